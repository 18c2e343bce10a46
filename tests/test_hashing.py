"""The hash of a file's content: the same for the same content, however it is stored, and cheap for holes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from drums_core.hashing import BLOCK_BYTES, hash_content, sha256_of


@pytest.fixture
def digest(tmp_path: Path) -> Callable[..., str]:
    """Of a file of this size with these parts: place -> bytes."""

    def make(size: int, *parts: tuple[int, bytes], filled: bool = False) -> str:
        fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            if filled:
                os.write(fd, bytes(size))
            os.ftruncate(fd, size)
            for at, data in parts:
                os.pwrite(fd, data, at)
            return hash_content(fd)
        finally:
            os.close(fd)

    return make


def test_a_small_file_has_the_plain_hash(digest: Callable[..., str]) -> None:
    assert digest(3, (0, b"yes")) == blake3(b"yes").hexdigest()
    assert digest(0) == blake3(b"").hexdigest()
    assert digest(BLOCK_BYTES) == blake3(bytes(BLOCK_BYTES)).hexdigest()


@pytest.mark.parametrize("size", [BLOCK_BYTES + 1, 4 * BLOCK_BYTES, 5 * BLOCK_BYTES - 7])
def test_holes_and_zeros_are_one(digest: Callable[..., str], size: int) -> None:
    part = (BLOCK_BYTES - 3, b"across blocks")
    assert digest(size, part) == digest(size, part, filled=True)
    assert digest(size) == digest(size, filled=True)


def test_each_byte_and_the_size_count(digest: Callable[..., str]) -> None:
    size = 3 * BLOCK_BYTES
    seen = [digest(size), digest(size + 1), digest(size, (0, b"x")), digest(size, (1, b"x")), digest(size, (0, b"y"))]
    seen += [
        digest(size, (BLOCK_BYTES, b"x")),
        digest(size, (size - 1, b"x")),
        digest(size, (0, b"x"), (size - 1, b"x")),
    ]
    assert len(set(seen)) == len(seen)


def test_a_terabyte_of_nothing_is_hashed(digest: Callable[..., str]) -> None:
    assert digest(1 << 40, (1 << 39, b"x")) != digest(1 << 40)


def test_the_hosts_own_files_have_their_sha256(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(3 * BLOCK_BYTES) + b"x")
    assert sha256_of(path) == sha256_of(os.fsencode(path)) == hashlib.sha256(path.read_bytes()).hexdigest()
