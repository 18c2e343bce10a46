"""Copies of verifiers' packages as they were when an episode began: what is installed meanwhile scores the next one."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Hashable
from pathlib import Path

import attrs

from drums_core.package_files import files_of, files_sha256
from drums_verifiers.installed import Installed


@attrs.frozen
class Copy:
    """A package as it was: `place` is its folder or file, in a folder of its own, under its own name."""

    verifier: Installed
    place: Path
    sha256: str


@attrs.define
class Copies:
    """The copies of one host, one of each state of a package. Several threads may use it."""

    _made: dict[Hashable, tuple[Path, str]] = attrs.field(factory=dict)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def of(self, verifier: Installed, folder: Path) -> Copy:
        """The copy of a verifier's package as it is now. Blocks.

        Args:
            folder: where copies are made.

        Raises:
            OSError: it cannot be read or copied.
        """
        state = (folder, verifier.place, *((n, s.st_ino, s.st_mtime_ns, s.st_size) for n, s in _stats(verifier.place)))
        with self._lock:
            if state not in self._made or not self._made[state][0].exists():
                self._made[state] = _copy(verifier.place, folder)
            place, sha256 = self._made[state]
        return Copy(verifier, place, sha256)


def _stats(place: Path) -> list[tuple[str, os.stat_result]]:
    return [(name, path.stat()) for name, path in files_of(place)]


def _copy(place: Path, folder: Path) -> tuple[Path, str]:
    folder.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder))
    copy = fresh / place.name
    if place.is_dir():
        shutil.copytree(place, copy)
    else:
        shutil.copy2(place, copy)
    # The worker reads it as nobody.
    for path in (fresh, copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    sha256 = files_sha256(copy)  # of what will run, whatever is written to the original meanwhile
    kept = folder / sha256
    try:
        fresh.rename(kept)
    except OSError:  # it is there already: the same content from another time
        shutil.rmtree(fresh)
    return kept / place.name, sha256
