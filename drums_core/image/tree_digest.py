"""The digest of a root file system: what an image is known by."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from drums_core.hashing import sha256_of


def digest_rootfs(directory: Path) -> str:
    """SHA-256 over everything in a root file system but times: path, type, mode, owner, size, target and content."""
    total = hashlib.sha256()
    root = os.fsencode(directory)
    for path in _walk(root):
        entry = os.lstat(path)
        # Folders' own sizes are the underlying file system's affair, and a device node has its number instead.
        size, target, content = 0, b"", ""
        if stat.S_ISREG(entry.st_mode):
            size, content = entry.st_size, sha256_of(path)
        elif stat.S_ISLNK(entry.st_mode):
            target = os.readlink(path)
        elif stat.S_ISBLK(entry.st_mode) or stat.S_ISCHR(entry.st_mode):
            size = entry.st_rdev
        fields = (f"{entry.st_mode:o} {entry.st_uid} {entry.st_gid} {size} {content}").encode()
        # NUL cannot occur in a path, so no two entries can read the same.
        total.update(b"\0".join((os.path.relpath(path, root), fields, target)) + b"\0\n")
    return total.hexdigest()


def _walk(root: bytes) -> Iterator[bytes]:
    yield root
    pending = [root]
    while pending:
        folder = pending.pop()
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            yield entry.path
        pending += [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
