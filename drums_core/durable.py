"""Small files that must be whole or not there: written beside, fsynced, renamed, the folder fsynced."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sync_directory(path: Path) -> None:
    """fsync a folder, so that the names in it last."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document durably and atomically, mode 0600."""
    partial = path.with_name(f".{path.name}.partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="ascii") as f:
        json.dump(document, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)
    sync_directory(path.parent)


def take_lock(path: Path, *, shared: bool = False, wait: bool = False) -> int:
    """Hold a lock on a folder, or on a file that is made if need be; close the descriptor to let go (flock(2)).

    Raises:
        BlockingIOError: somebody else holds it and `wait` is not set.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """`take_lock` for a block."""
    fd = take_lock(path, shared=shared, wait=wait)
    try:
        yield
    finally:
        os.close(fd)
