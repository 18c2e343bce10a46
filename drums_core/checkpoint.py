"""Checkpoints on disk: CRIU's images, the frozen file layer, the gates' evidence, and a manifest that vouches for all.

A checkpoint is complete only when its manifest is there, written last and fsynced, with size and hash of every
file. What does not match is refused by name; nothing of it is ever used.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs
from blake3 import blake3

import drums
from drums.errors import CheckpointError
from drums_core.boot import layout_digest
from drums_core.criu_provider import Criu
from drums_core.durable import sync_directory, write_json
from drums_core.hashing import hash_content
from drums_core.model import Json, Task
from drums_core.sys.overlay import Layer
from drums_core.sys.removal import remove_tree

MANIFEST = "manifest.json"
EVIDENCE = "evidence.json"
IMAGES = "criu"
UPPER = "upper"


@attrs.frozen
class HostFacts:
    """What a checkpoint is bound to: another kernel, processor, CRIU or drums may not restore it."""

    kernel: str
    cpu_features: str  # hash of the processor's flags
    criu: str  # hash of the CRIU binary
    layout: str  # hash of how this drums lays desktops out

    @classmethod
    def of_this_host(cls, criu: Criu) -> HostFacts:
        """The facts of this host with this CRIU."""
        flags = ""
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = " ".join(sorted(line.partition(":")[2].split()))
                break
        return cls(platform.release(), blake3(flags.encode()).hexdigest()[:16], criu.sha256, layout_digest())


@attrs.frozen
class Manifest:
    """What a checkpoint is. `files` maps each path to [size in bytes, blake3]; `layers` are ids, topmost first."""

    id: str
    name: str
    kind: str  # golden, saved, fork or end_state
    created_at: float
    drums: str
    host: HostFacts
    image: str
    image_digest: str
    layers: tuple[str, ...]
    base: str  # the checkpoint that a reset of a desktop from here goes back to
    init_argv: tuple[str, ...]
    task: Json
    files: Mapping[str, Sequence[Json]]
    end_state: Json = None  # what an end state's grade rests on besides: see `end_states.EndState`


_converter = cattrs.Converter(forbid_extra_keys=True)


@attrs.frozen
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def id(self) -> str:
        """Its id."""
        return self.manifest.id

    @property
    def images(self) -> Path:
        """CRIU's images."""
        return self.path / IMAGES

    def evidence(self) -> dict[str, Json]:
        """The gates' evidence by gate name."""
        document: dict[str, Json] = json.loads((self.path / EVIDENCE).read_bytes())
        return document

    def task(self) -> Task | None:
        """The task whose set-up state it holds."""
        document = self.manifest.task
        return None if document is None else _converter.structure(document, Task)


def task_document(task: Task | None) -> Json:
    """A task as a manifest holds it."""
    return None if task is None else attrs.asdict(task, value_serializer=_plain)


def _plain(_: Any, __: Any, value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's folder.

    Raises:
        OSError: it cannot be read; FileNotFoundError when there is none.
        ValueError: it is none.
    """
    document = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(document, dict):
        raise ValueError(f"the manifest in {str(folder)!r} is a {type(document).__name__}, expected an object")
    try:
        return _converter.structure(document, Manifest)
    except cattrs.BaseValidationError as e:
        raise ValueError(f"the manifest in {str(folder)!r}: {'; '.join(cattrs.transform_error(e))}") from e


def _walk(top: Path) -> list[tuple[str, os.stat_result]]:
    """Every entry below a folder as (relative path, lstat), sorted; no link is followed."""
    found: list[tuple[str, os.stat_result]] = []
    pending = [""]
    while pending:
        folder = pending.pop()
        with os.scandir(top / folder) as entries:
            for entry in entries:
                relative = f"{folder}/{entry.name}" if folder else entry.name
                info = entry.stat(follow_symlinks=False)
                found.append((relative, info))
                if stat.S_ISDIR(info.st_mode):
                    pending.append(relative)
    return sorted(found)


def _hash_entry(path: Path, info: os.stat_result) -> str:
    if stat.S_ISREG(info.st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return hash_content(fd)
        finally:
            os.close(fd)
    if stat.S_ISLNK(info.st_mode):
        return "-> " + os.fsencode(os.readlink(path)).hex()
    return f"{stat.S_IFMT(info.st_mode):o} {info.st_rdev}"


def list_files(top: Path) -> dict[str, list[Json]]:
    """Size, owner, mode and hash of everything below a checkpoint's folder, the manifest left out."""
    out: dict[str, list[Json]] = {}
    for relative, info in _walk(top):
        if relative in (MANIFEST, f".{MANIFEST}.partial") or relative.endswith(".log"):
            continue
        size = info.st_size if stat.S_ISREG(info.st_mode) else 0
        key = os.fsencode(relative).decode("latin-1")
        out[key] = [size, f"{info.st_mode:o} {info.st_uid} {info.st_gid}", _hash_entry(top / relative, info)]
    return out


def _signature(top: Path) -> tuple[tuple[Any, ...], ...]:
    # The change time cannot be set by a caller: a file that was touched since it was hashed shows here.
    return tuple((p, i.st_ino, i.st_size, i.st_mtime_ns, i.st_ctime_ns) for p, i in _walk(top))


@attrs.define(eq=False)
class CheckpointStore:
    """The checkpoints of a host, with counts of who uses them. Methods block: call them in a thread."""

    path: Path
    host: HostFacts
    _uses: dict[str, int] = attrs.field(factory=dict)
    _counting: threading.Lock = attrs.field(factory=threading.Lock)  # desktops stop side by side, in threads
    _ephemeral: set[str] = attrs.field(factory=set)
    _forks: set[str] = attrs.field(factory=set)  # made here: another host's are its own to remove
    _verified: dict[str, tuple[tuple[Any, ...], ...]] = attrs.field(factory=dict)

    def begin(self) -> tuple[str, Path]:
        """A new id and an empty folder for it, not yet a checkpoint."""
        identity = f"c-{uuid.uuid4().hex[:16]}"
        folder = self.path / identity
        folder.mkdir(mode=0o700)
        try:
            # CRIU reads images through a descriptor as root of the desktop's user namespace, nobody on the host.
            (folder / IMAGES).mkdir(mode=0o755)
        except OSError:
            folder.rmdir()
            raise
        return identity, folder

    def finish(self, folder: Path, **facts: Any) -> Checkpoint:
        """Hash everything, make it durable and write the manifest; `facts` are the manifest's other fields."""
        files = list_files(folder)
        for relative in files:
            path = folder / os.fsdecode(relative.encode("latin-1"))
            if path.is_file() and not path.is_symlink():
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
        sync_directory(folder / IMAGES)
        manifest = Manifest(
            id=folder.name, created_at=time.time(), drums=drums.__version__, host=self.host, files=files, **facts
        )
        write_json(folder / MANIFEST, attrs.asdict(manifest))
        sync_directory(self.path)
        self._verified[manifest.id] = _signature(folder)
        if manifest.kind == "fork":
            self._ephemeral.add(manifest.id)
            self._forks.add(manifest.id)
        else:
            # What a kept checkpoint stands on is kept with it.
            self._ephemeral.difference_update(manifest.layers)
        return Checkpoint(folder, manifest)

    def load(self, name: str) -> Checkpoint:
        """The checkpoint with this id or saved name, verified.

        Raises:
            CheckpointError: unknown, incomplete, damaged, or made by another kernel, processor or CRIU.
        """
        folder = self._find(name)
        try:
            manifest = _read_manifest(folder)
        except FileNotFoundError as e:
            raise CheckpointError(
                f"checkpoint {name!r} is incomplete: it has no manifest",
                hint="remove it and save again",
                checkpoint=name,
            ) from e
        except ValueError as e:
            raise CheckpointError(
                f"checkpoint {name!r} is damaged: its manifest cannot be read", checkpoint=name
            ) from e
        self._check_host(name, manifest)
        self._check_files(name, folder, manifest)
        for identity in manifest.layers:
            if identity != manifest.id:
                self._check_layer(name, identity)
        return Checkpoint(folder, manifest)

    def _check_layer(self, name: str, identity: str) -> None:
        """Verify a checkpoint that another one stands on."""
        folder = self.path / identity
        try:
            below = _read_manifest(folder)
        except (OSError, ValueError) as e:
            raise CheckpointError(
                f"checkpoint {name!r} is damaged: {identity!r}, on which it stands, is missing or cannot be read",
                checkpoint=name,
            ) from e
        try:
            self._check_files(identity, folder, below)
        except CheckpointError as e:
            raise CheckpointError(
                f"checkpoint {name!r} stands on {identity!r}, which is damaged: {e.message}", checkpoint=name
            ) from e

    def _find(self, name: str) -> Path:
        for folder in sorted(self.path.iterdir()) if self.path.is_dir() else []:
            if folder.name == name:
                return folder
            try:
                document = json.loads((folder / MANIFEST).read_bytes())
            except (OSError, ValueError):
                continue
            if isinstance(document, dict) and document.get("name") == name and document.get("kind") == "saved":
                return folder
        known = sorted(m.name for m in self.names() if m.kind == "saved")
        raise CheckpointError(f"no checkpoint {name!r}", hint=f"saved are: {known}", checkpoint=name, known=known)

    def _check_host(self, name: str, manifest: Manifest) -> None:
        for what in ("kernel", "cpu_features", "criu", "layout"):
            made, here = getattr(manifest.host, what), getattr(self.host, what)
            if made != here:
                raise CheckpointError(
                    f"checkpoint {name!r} was made with {what} {made!r}, this host has {here!r}",
                    hint="restore it where it was made; a golden one is made anew by `drums image ensure`",
                    checkpoint=name,
                )

    def _check_files(self, name: str, folder: Path, manifest: Manifest) -> None:
        signature = _signature(folder)
        if self._verified.get(manifest.id) == signature:
            return
        have = list_files(folder)
        for relative, want in manifest.files.items():
            got = have.pop(relative, None)
            if got is None:
                raise CheckpointError(f"checkpoint {name!r} is damaged: {relative!r} is missing", checkpoint=name)
            if list(got) != list(want):
                what = "size" if got[0] != want[0] else "owner or mode" if got[1] != want[1] else "content"
                raise CheckpointError(
                    f"checkpoint {name!r} is damaged: {what} of {relative!r} is {got!r}, allowed is {list(want)!r}",
                    checkpoint=name,
                )
        if have:
            raise CheckpointError(
                f"checkpoint {name!r} is damaged: {min(have)!r} is not in its manifest", checkpoint=name
            )
        self._verified[manifest.id] = signature

    def layers(self, checkpoint: Checkpoint) -> list[Layer]:
        """Its file layers, topmost first, without the image's."""
        return [Layer(self.path / identity / UPPER, shifted=True) for identity in checkpoint.manifest.layers]

    def acquire(self, checkpoint: Checkpoint) -> None:
        """Count a use of it and of the layers below it."""
        with self._counting:
            for identity in checkpoint.manifest.layers:
                self._uses[identity] = self._uses.get(identity, 0) + 1

    def release(self, checkpoint: Checkpoint) -> None:
        """Let go; a fork's checkpoint that nobody uses any more is removed."""
        unused = []
        with self._counting:
            for identity in checkpoint.manifest.layers:
                self._uses[identity] -= 1
                if not self._uses[identity]:
                    del self._uses[identity]
                    unused.append(identity)
        for identity in unused:
            if identity in self._ephemeral:
                self.discard(identity)

    def discard(self, identity: str) -> None:
        """Remove a checkpoint's folder, the manifest first, so that an interrupted removal leaves no half-usable one.

        Raises:
            CheckpointError: it is in use.
        """
        if self._uses.get(identity):
            raise CheckpointError(f"checkpoint {identity!r} is in use", checkpoint=identity)
        folder = self.path / identity
        (folder / MANIFEST).unlink(missing_ok=True)
        remove_tree(folder)
        self._ephemeral.discard(identity)
        self._forks.discard(identity)
        self._verified.pop(identity, None)

    def discard_alone(self, manifest: Manifest) -> None:
        """Remove a kept checkpoint, and the forks' ones below it that were kept for its sake alone.

        Raises:
            CheckpointError: it is in use.
        """
        self.discard(manifest.id)
        for identity in manifest.layers[1:]:
            others = self.names()
            if identity not in self._forks or any(identity in m.layers for m in others if m.id != identity):
                continue
            if self._uses.get(identity):
                self._ephemeral.add(identity)  # its last user removes it
            else:
                self.discard(identity)

    def names(self) -> list[Manifest]:
        """The manifests of all complete checkpoints."""
        found = []
        for folder in sorted(self.path.iterdir()) if self.path.is_dir() else []:
            try:
                found.append(_read_manifest(folder))
            except (OSError, ValueError):
                continue
        return found
