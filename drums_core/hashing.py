"""Hashes of files' contents: of the host's own, and of an agent's, who must not make that expensive.

A file of a terabyte that is one hole costs its maker nothing, and whoever reads it an hour, in a desktop that is frozen
meanwhile. So of a file that is larger than a block only the blocks that hold something count, with their places. The
result depends on the content alone, not on how a file system stores it.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from blake3 import blake3

SCHEME = "blocks-1"  # of a layout's digest: evidence of another scheme compares with nothing
BLOCK_BYTES = 1 << 20
_ZEROS = bytes(BLOCK_BYTES)


def sha256_of(path: Path | bytes) -> str:
    """SHA-256 of one of the host's own files, byte by byte, in hexadecimal. Blocks; raises `OSError`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_content(fd: int) -> str:
    """BLAKE3 of what an open regular file holds, in hexadecimal. Blocks; the descriptor stays open."""
    hasher = blake3()
    size = os.fstat(fd).st_size
    if size <= BLOCK_BYTES:
        at = 0
        while data := os.pread(fd, BLOCK_BYTES, at):
            hasher.update(data)
            at += len(data)
        digest: str = hasher.hexdigest()
        return digest
    at = 0
    while (at := _next_data(fd, at)) < size:
        at -= at % BLOCK_BYTES
        data = _whole_block(fd, at)
        if data != _ZEROS[: len(data)]:
            hasher.update(at.to_bytes(8, "little"))
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
        at += BLOCK_BYTES
    hasher.update(size.to_bytes(8, "little"))
    digest = hasher.hexdigest()
    return digest


def _next_data(fd: int, at: int) -> int:
    """The first place from `at` on that may hold something (lseek(2), SEEK_DATA); far behind the end when none does."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as e:
        if e.errno == errno.ENXIO:
            return 1 << 63
        if e.errno == errno.EINVAL:  # a file system without holes
            return at
        raise


def _whole_block(fd: int, at: int) -> bytes:
    data = os.pread(fd, BLOCK_BYTES, at)
    while len(data) < BLOCK_BYTES and (more := os.pread(fd, BLOCK_BYTES - len(data), at + len(data))):
        data += more
    return data
