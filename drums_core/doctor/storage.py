"""Probes of the state folder: space, extended attributes, and an overlay as a desktop has it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from drums_core.doctor.finding import Finding
from drums_core.doctor.trial import run_trial

_SPACE_WANTED = 5 << 30
_MOVE = "set DRUMS_STATE_DIR to a folder on ext4, xfs or btrfs"


def existing_ancestor(path: Path) -> Path:
    """The folder itself, or the nearest one above that exists: a doctor makes no state folder."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


@contextlib.contextmanager
def _scratch(state_dir: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=".drums-doctor-", dir=existing_ancestor(state_dir)))
    try:
        yield path
    finally:
        # Mounts of a trial exist in its own mount namespace only, so this reaches no other file system.
        shutil.rmtree(path)


def disk_space(state_dir: Path) -> Finding:
    """Free space where images and checkpoints go."""
    place = existing_ancestor(state_dir)
    free = shutil.disk_usage(place).free
    ok = free >= _SPACE_WANTED
    observed = f"{free / (1 << 30):.1f} GiB free at {str(place)!r}"
    remedy = "" if ok else "free some space, or set DRUMS_STATE_DIR to a larger disk"
    return Finding("disk", True, ok, observed, ">= 5 GiB free", remedy)


def attributes(state_dir: Path) -> Finding:
    """Whether files there can carry the attributes that an overlay's upper layer needs."""
    fstype = _fstype(existing_ancestor(state_dir))
    wanted = "trusted and user extended attributes, not itself an overlay"
    refused = ["is an overlay itself"] if fstype == "overlay" else []
    with _scratch(state_dir) as scratch:
        for name in ("trusted.drums", "user.drums"):
            try:
                os.setxattr(scratch, name, b"1")
            except OSError as error:
                refused.append(f"{name}: {error.strerror}")
    observed = f"{fstype}: {', '.join(refused)}" if refused else fstype
    return Finding("state_dir", True, not refused, observed, wanted, _MOVE if refused else "")


def overlay(state_dir: Path) -> Finding:
    """A desktop's overlay: id-mapped layer by descriptor, its options in force, file handles that open."""
    with _scratch(state_dir) as scratch:
        answer = run_trial("overlay", str(scratch))
    wanted = "overlay with index=on,nfs_export=on over an id-mapped layer"
    remedy = f"{_MOVE}; else use a newer kernel (6.15 takes detached layers)"
    return Finding("overlay", True, answer.ok, answer.detail, wanted, "" if answer.ok else remedy)


def _fstype(path: Path) -> str:
    """Type of the file system that holds a path, by the longest mount point above it."""
    best, fstype = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        _, where, kind, *_ = line.split()
        where = where.encode().decode("unicode_escape")
        if path.is_relative_to(where) and len(where) >= len(best):
            best, fstype = where, kind
    return fstype
