"""A mirror: a folder with the files that tasks name by URL.

A file's path in it is, for OSWorld's data set, the part of its URL behind `/resolve/main/`,
percent-encoding undone; of any other URL it is `elsewhere/`, the host, and the sha256 of the URL, so that no two share
a place. A `manifest.json` in it (a list of objects with `file`, `size` and `sha256`) is held against what is read. A
file that is not there, or is not what the manifest says, is an error: nobody ever gets an empty or a partial one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import urllib.parse
from pathlib import Path

from drums.errors import SetupFailed
from drums_core.urls import without_credentials

HOSTS = frozenset({"huggingface.co", "hf-mirror.com"})
MARK = "/datasets/xlangai/ubuntu_osworld_file_cache/resolve/main/"
"""Where OSWorld's data set is served."""
ELSEWHERE = "elsewhere"
LARGEST_BYTES = 200 << 20  # the guest server takes 256 MiB
MANIFEST = "manifest.json"
_LONGEST_NAME = 240  # bytes; a file system takes 255, and a new file has a longer name at first


def mirrored_path(url: str) -> tuple[str, ...]:
    """The parts of a URL's path in a mirror.

    Raises:
        ValueError: it has none.
    """
    parsed = urllib.parse.urlsplit(url)
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise ValueError("only files at http and https URLs can be had")
    try:
        _ = parsed.port
    except ValueError:
        # Not with the error as its cause: that quotes what may be a password with a `/` in it.
        raise ValueError("the port in its URL is none from 0 to 65535") from None
    rest = parsed.path.removeprefix(MARK)
    if parsed.hostname not in HOSTS or rest == parsed.path:
        host = parsed.netloc.rpartition("@")[2].lower()
        whole = f"{parsed.scheme}://{host}{parsed.path}" + (f"?{parsed.query}" if parsed.query else "")
        return ELSEWHERE, urllib.parse.quote(host, safe=""), hashlib.sha256(whole.encode()).hexdigest()
    parts = tuple(urllib.parse.unquote(part, errors="strict") for part in rest.split("/"))
    if any(part in ("", ".", "..") or "/" in part or "\0" in part for part in parts):
        raise ValueError("its path leaves the mirror")
    if parts[0].startswith(".") or parts[0] in (MANIFEST, ELSEWHERE):
        raise ValueError(f"its path is {parts[0]!r}, which is the mirror's own")
    if any(len(part.encode()) > _LONGEST_NAME for part in parts):
        raise ValueError(f"a name in its path has more than {_LONGEST_NAME} bytes")
    return parts


def is_mirrored(mirror: Path, url: str) -> bool:
    """Whether something is in a file's place in a mirror; raises `SetupFailed` for a URL that has no place there."""
    try:
        return os.path.lexists(mirror.joinpath(*mirrored_path(url)))
    except ValueError as e:
        raise _failure(url, str(e)) from e


def read_mirrored(mirror: Path, url: str) -> bytes:
    """A file's content. Blocks.

    Raises:
        SetupFailed: it cannot be had; names the URL and the cause.
    """
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
        why = "is not in the mirror" if absent else f"cannot be read: {e.strerror}"
        raise _failure(url, f"{str(path)!r} {why}") from e
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
    if not isinstance(document, list):
        raise _failure(url, f"the mirror's {MANIFEST} is no list of files")
    for entry in document:
        if isinstance(entry, dict) and entry.get("file") == name and isinstance(entry.get("sha256"), str):
            return str(entry["sha256"])
    return None


def _failure(url: str, cause: str) -> SetupFailed:
    shown = without_credentials(url)
    return SetupFailed(f"{shown!r} cannot be had: {cause}", url=shown, cause=cause, output="")
