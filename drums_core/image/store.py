"""The images of a host: built whole or not at all, named, listed and removed."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import attrs
import cattrs

import drums
from drums.errors import ImageNotFound, ImageUnsuitable
from drums_core.durable import sync_directory, take_lock, write_json
from drums_core.image import extension
from drums_core.image.recipe import known_recipes, load_recipe
from drums_core.image.rootfs import build_rootfs, debian_sources
from drums_core.image.software import Software
from drums_core.image.tree_digest import digest_rootfs
from drums_core.sys.overlay import Layer
from drums_core.sys.removal import remove_tree
from drums_core.sys.seccomp import desktop_filter

ROOTFS = "rootfs"
RECORD = "image.json"
GOLDEN = "golden.json"


@attrs.frozen
class Image:
    """A built image. `digest` covers every file of it, the guest server included."""

    name: str
    digest: str
    built_at: float
    drums: str
    size_bytes: int
    inputs: str
    path: Path

    @property
    def layer(self) -> Layer:
        """Its root file system as an overlay's lowest layer."""
        return Layer(self.path / ROOTFS, shifted=False)

    def golden_id(self) -> str | None:
        """Its golden checkpoint's id, if one was made whose processes have the filter that desktops have now."""
        try:
            document = json.loads((self.path / GOLDEN).read_bytes())
        except FileNotFoundError:
            return None
        return str(document["checkpoint"]) if document.get("seccomp") == _filter_digest() else None

    def set_golden(self, checkpoint: str) -> None:
        """Record its golden checkpoint."""
        write_json(self.path / GOLDEN, {"checkpoint": checkpoint, "seccomp": _filter_digest()})


def _filter_digest() -> str:
    """Of the filter, which processes keep when they are restored."""
    return hashlib.sha256(desktop_filter()).hexdigest()


def inputs_digest(name: str, software: Sequence[Software] = ()) -> str:
    """A hash of what an image is built from besides Debian: recipe, overlaid files, guest server, and the builder.

    What makes its digest is among them: the same files are to have the same digest.
    An image with other inputs speaks another guest protocol, or lacks something: it is built anew.

    Args:
        name: the image's.
        software: what is added to it on this host.

    Raises:
        ConfigError: a key of the software cannot be read.
    """
    top = resources.files("drums_core")
    hasher = hashlib.sha256()
    for part in ("guest", "image/recipes", "image/rootfs.py", "image/tree_digest.py"):
        for relative, content in sorted(_contents(top / part, part)):
            # Another recipe's files are no input of this one.
            if relative.startswith("image/recipes/") and not relative.startswith(f"image/recipes/{name}"):
                continue
            hasher.update(f"{relative}\0{len(content)}\0".encode() + content)
    # Of the extension's parts an image without software has nothing.
    for one in software:
        hasher.update(one.identity())
    for part in ("image/applications", "image/extension.py") if software else ():
        for relative, content in sorted(_contents(top / part, part)):
            hasher.update(f"{relative}\0{len(content)}\0".encode() + content)
    return hasher.hexdigest()


def _contents(entry: Traversable, relative: str) -> Iterator[tuple[str, bytes]]:
    if entry.is_file():
        yield relative, entry.read_bytes()
    elif entry.name != "__pycache__":
        for child in entry.iterdir():
            yield from _contents(child, f"{relative}/{child.name}")


@attrs.frozen
class ImageStore:
    """The images below a folder. Methods block.

    Args:
        path: the folder.
        software: what this host adds to images.
    """

    path: Path
    software: tuple[Software, ...] = ()

    def names(self) -> list[str]:
        """The images that are built."""
        if not self.path.is_dir():
            return []
        return sorted(p.name for p in self.path.iterdir() if (p / RECORD).is_file() and not p.name.startswith("."))

    def load(self, name: str) -> Image:
        """The image of this name.

        Raises:
            ImageNotFound: it is not built; `.known` are those that are.
        """
        known = self.names()
        if name not in known:
            hint = (
                f"build it: drums image build {name}" if name in known_recipes() else f"built here: {known or 'none'}"
            )
            raise ImageNotFound(f"no image {name!r}", hint=hint, image=name, known=known)
        folder = self.path / name
        record = {"inputs": "", **json.loads((folder / RECORD).read_bytes())}
        return cattrs.structure({**record, "path": str(folder)}, Image)

    def is_current(self, image: Image) -> bool:
        """Whether it was built from this drums' recipe and guest server, with the software that this host adds to it.

        Raises:
            ConfigError: a key of the software cannot be read.
        """
        return image.inputs == inputs_digest(image.name, self._added(image.name))

    def _added(self, name: str) -> list[Software]:
        return [one for one in self.software if one.image == name]

    def use(self, name: str) -> int:
        """A descriptor that marks the image as used until it is closed."""
        return take_lock(self.path / name / "use.lock", shared=True)

    def build(self, name: str, *, mirror: str | None, progress: Callable[[str, float], None]) -> Image:
        """Build an image from its recipe and put it in place; an older one of the name is replaced.

        Raises:
            ImageNotFound: no such recipe.
            ImageBuildError: it could not be built; nothing half-usable is left.
            ImageUnsuitable: the older one is in use.
            ConfigError, PrerequisiteError: the software that this host adds cannot be had.
        """
        recipe, added = load_recipe(name), self._added(name)
        inputs = inputs_digest(name, added)  # as of now: what is changed meanwhile is in the next build
        self.path.mkdir(parents=True, exist_ok=True)
        self._sweep()
        folder = self.path / f".build-{name}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(mode=0o700)
        lock = take_lock(folder / "build.lock")
        try:
            fetched = folder / "fetched"
            if added:
                extension.fetch(added, fetched, lambda text, _: progress(text, 0.0))
            build_rootfs(
                recipe, folder / ROOTFS, mirror=mirror, progress=lambda text, part: progress(text, part * 0.95)
            )
            if added:
                sources = debian_sources(recipe.suite, mirror=mirror)
                extension.install(added, fetched, folder / ROOTFS, sources, lambda text, _: progress(text, 0.95))
                remove_tree(fetched)
            progress("hashing the image", 0.96)
            record = {
                "name": name,
                "digest": digest_rootfs(folder / ROOTFS),
                "built_at": time.time(),
                "drums": drums.__version__,
                "size_bytes": _size(folder / ROOTFS),
                "inputs": inputs,
            }
            write_json(folder / RECORD, record)
            if (self.path / name).exists():
                self.remove(name)
            os.rename(folder, self.path / name)
            sync_directory(self.path)
        except BaseException:
            remove_tree(folder)
            raise
        finally:
            os.close(lock)
        progress("image in place", 1.0)
        return self.load(name)

    def remove(self, name: str) -> None:
        """Remove an image.

        Raises:
            ImageNotFound: there is none.
            ImageUnsuitable: desktops use it.
        """
        image = self.load(name)
        try:
            lock = take_lock(image.path / "use.lock")
        except BlockingIOError as e:
            raise ImageUnsuitable(f"image {name!r} is in use by desktops", hint="close them first") from e
        try:
            (image.path / RECORD).unlink()  # from here on it is no image
            remove_tree(image.path)
        finally:
            os.close(lock)

    def _sweep(self) -> None:
        """Remove what interrupted builds left; a build that still runs holds its lock."""
        for folder in self.path.glob(".build-*"):
            try:
                lock = take_lock(folder / "build.lock")
            except (BlockingIOError, FileNotFoundError):
                continue
            try:
                remove_tree(folder)
            finally:
                os.close(lock)


def _size(top: Path) -> int:
    total = 0
    for folder, _, files in os.walk(top):
        for name in files:
            total += os.lstat(os.path.join(folder, name)).st_size
    return total
