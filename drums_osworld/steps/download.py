"""The `download` step: put files that the task names by URL into the desktop, from the host's mirror.

The mirror is a folder: a file's path in it is the part of its URL behind `/resolve/main/`, percent-encoding undone. A
`manifest.json` in it (a list of objects with `file`, `size` and `sha256`) is held against what is read. A file that is
not there, or is not what the manifest says, fails the set-up: a desktop never gets an empty or a partial one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

import attrs
import trio

from drums.errors import ConfigError, SetupFailed
from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.parameters import structure

MARK = "/resolve/main/"
LARGEST_BYTES = 200 << 20  # the guest server takes 256 MiB
MANIFEST = "manifest.json"


@attrs.frozen
class File:
    """One file: where it comes from, and its path in the desktop."""

    url: str
    path: str


@attrs.frozen
class DownloadParameters:
    """The parameters of `download`."""

    files: tuple[File, ...]


class Download:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> DownloadParameters:
        """The parameters; raises `ConfigError`."""
        parsed = structure(parameters, DownloadParameters, "download")
        for index, file in enumerate(parsed.files):
            for key, value in (("url", file.url), ("path", file.path)):
                if not value.strip() or "\0" in value:
                    raise ConfigError(
                        f"the parameters of a 'download' step are wrong: {key} of file {index} is {value!r}",
                        path=f"$.parameters.files[{index}].{key}",
                    )
        return parsed

    async def run(self, context: StepContext, parameters: object) -> None:
        """Put every file into the desktop; raises `SetupFailed` and `GuestError`."""
        assert isinstance(parameters, DownloadParameters)
        for file in parameters.files:
            content = await trio.to_thread.run_sync(read_mirrored, context.file_mirror, file.url)
            await context.upload(file.path, content)


def mirrored_path(url: str) -> tuple[str, ...]:
    """The parts of a URL's path in a mirror.

    Raises:
        ValueError: it has none.
    """
    parsed = urllib.parse.urlsplit(url)
    _, mark, rest = parsed.path.partition(MARK)
    if parsed.scheme not in ("http", "https") or not mark:
        raise ValueError(f"only URLs with {MARK!r} in their path can be mirrored")
    parts = tuple(urllib.parse.unquote(part, errors="strict") for part in rest.split("/"))
    if any(part in ("", ".", "..") or "/" in part or "\0" in part for part in parts):
        raise ValueError("its path leaves the mirror")
    return parts


def read_mirrored(mirror: Path | None, url: str) -> bytes:
    """A file's content. Blocks.

    Raises:
        SetupFailed: it cannot be had; names the URL and the cause.
    """
    if mirror is None:
        raise _failure(url, "this host has no mirror", "set file_mirror or DRUMS_FILE_MIRROR")
    try:
        parts = mirrored_path(url)
    except ValueError as e:
        raise _failure(url, str(e)) from e
    path = mirror.joinpath(*parts)
    try:
        with open(path, "rb", opener=open_nonblocking) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise _failure(url, f"{str(path)!r} in the mirror is no regular file")
            if facts.st_size > LARGEST_BYTES:
                raise _failure(url, f"it has {facts.st_size} bytes, allowed are {LARGEST_BYTES}")
            content = file.read(LARGEST_BYTES + 1)
    except OSError as e:
        absent = e.errno in (errno.ENOENT, errno.ENOTDIR)
        raise _failure(
            url, f"{str(path)!r} is not in the mirror" if absent else f"{str(path)!r} cannot be read: {e.strerror}"
        ) from e
    if len(content) != facts.st_size:
        raise _failure(url, f"{str(path)!r} changed while it was read")
    _check(mirror, url, "/".join(parts), content)
    return content


def open_nonblocking(path: str, flags: int) -> int:
    """An opener for `open` that waits for nothing: a named pipe would hold the set-up for ever."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check(mirror: Path, url: str, name: str, content: bytes) -> None:
    entry = _manifest_entry(mirror, url, name)
    if entry is None:
        if not content:
            raise _failure(url, f"{name!r} in the mirror is empty, and no {MANIFEST} says that it should be")
        return
    digest = hashlib.sha256(content).hexdigest()
    if digest != entry:
        raise _failure(url, f"{name!r} in the mirror has sha256 {digest}, its {MANIFEST} says {entry}")


def _manifest_entry(mirror: Path, url: str, name: str) -> str | None:
    """The sha256 that the mirror's manifest has for a file; None when it has none."""
    try:
        document = json.loads((mirror / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise _failure(url, f"the mirror's {MANIFEST} cannot be read: {e}") from e
    for entry in document if isinstance(document, list) else ():
        if isinstance(entry, dict) and entry.get("file") == name and isinstance(entry.get("sha256"), str):
            return str(entry["sha256"])
    return None


def _failure(url: str, cause: str, hint: str = "") -> SetupFailed:
    return SetupFailed(f"{url!r} cannot be had: {cause}", hint=hint, url=url, cause=cause, output="")


def _factory() -> Step:
    return Download()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `download` step."""
    register("download", _factory)
