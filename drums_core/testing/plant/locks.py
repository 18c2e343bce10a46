"""File locks that are not as they were: dropped, weakened, on another range, held by another, one too many.

Flock and OFD locks are an open file description's: a descriptor of the very description changes them from outside. A
POSIX lock is its process's own, so the call is made in its place.

Sources: flock(2), fcntl(2), proc(5).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator

from drums_core.sys.descriptors import open_targets, shared_description
from drums_core.testing.plant.in_place import in_place
from drums_core.testing.plant.target import Target, stay, wait_for

_SYS_CLOSE, _SYS_FCNTL = 3, 72
_F_SETLK, _F_OFD_SETLK = 6, 37
_FLOCK_LAYOUT = "hhxxxxqqixxxx"
_ELSEWHERE = 1000


def change_lock(target: Target, kind: str, how: str, name: str) -> None:
    """Change the lock of this kind that a process of the desktop holds on the file of this name.

    Args:
        kind: FLOCK, OFDLCK or POSIX.
        how: `drop` it; `weaken` it to a shared one; `strengthen` it to an exclusive one; `shift` its end by one byte;
            add an `extra` one next to it; `move` it to another process that has the file open; `unshare` it: close the
            descriptor of a process that shares it.
        name: the last part of the file's path.
    """
    holders = list(_locks(target, kind, name))
    if not holders:
        raise LookupError(f"the desktop holds no {kind} lock on {name!r}")
    pid, fd, words = holders[0]
    start = int(words[-2])
    length = 0 if words[-1] == "EOF" else int(words[-1]) + 1 - start
    exclusive = fcntl.F_WRLCK if words[4] == "WRITE" else fcntl.F_RDLCK
    if how == "unshare":
        if len(holders) < 2:
            raise LookupError(f"nobody shares the lock on {name!r}")
        pid, fd, _ = holders[-1]
        in_place(pid, _SYS_CLOSE, fd)
    elif how == "move":
        _set(kind, pid, fd, fcntl.F_UNLCK, start, length)
        other, other_fd = _beside(target, name, {(p, f) for p, f, _ in holders})
        _set(kind, other, other_fd, exclusive, start, length)
    elif how == "shift":
        _set(kind, pid, fd, fcntl.F_UNLCK, start + length - 1, 1)
    elif how == "extra":
        _set(kind, pid, fd, exclusive, start + _ELSEWHERE, 5)
    else:
        lock_type = {"drop": fcntl.F_UNLCK, "weaken": fcntl.F_RDLCK, "strengthen": fcntl.F_WRLCK}[how]
        _set(kind, pid, fd, lock_type, start, length)


def _locks(target: Target, kind: str, name: str) -> Iterator[tuple[int, int, list[str]]]:
    """Process, descriptor and words of each `lock:` line of this kind for this file."""
    for pid, fd in _open_at(target, name):
        for line in _read(f"/proc/{pid}/fdinfo/{fd}").splitlines():
            words = line.split()
            if words and words[0] == "lock:" and words[2] == kind:
                yield pid, fd, words


def _open_at(target: Target, name: str) -> Iterator[tuple[int, int]]:
    for pid in target.pids():
        for fd, path in open_targets(pid):
            if path.removesuffix(" (deleted)").rpartition("/")[2] == name:
                yield pid, fd


def _beside(target: Target, name: str, holders: set[tuple[int, int]]) -> tuple[int, int]:
    for place in _open_at(target, name):
        if place[0] not in {pid for pid, _ in holders}:
            return place
    raise LookupError(f"no other process has {name!r} open")


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as f:
        return f.read()


def _set(kind: str, pid: int, fd: int, lock_type: int, start: int, length: int) -> None:
    request = struct.pack(_FLOCK_LAYOUT, lock_type, os.SEEK_SET, start, length, 0)
    if kind == "POSIX":
        in_place(pid, _SYS_FCNTL, fd, _F_SETLK, request)
    elif kind == "FLOCK":
        operations = {fcntl.F_UNLCK: fcntl.LOCK_UN, fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX}
        fcntl.flock(shared_description(pid, fd), operations[lock_type] | fcntl.LOCK_NB)
    else:
        fcntl.fcntl(shared_description(pid, fd), _F_OFD_SETLK, request)


def add_lock(target: Target) -> None:
    """Put a shared flock that nobody held on a regular file of the desktop that one of its processes has open.

    The lock is the open file description's, so that it stays when this process ends.
    """
    for pid in target.pids():
        for fd, path in open_targets(pid):
            with contextlib.suppress(FileNotFoundError):
                # While CRIU is at work its own files are open, too; they have no path inside.
                inside = os.stat(f"/proc/{target.pid1}/root{path}", follow_symlinks=False)
                if stat.S_ISREG(inside.st_mode) and os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), inside):
                    fcntl.flock(shared_description(pid, fd), fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
    raise LookupError("no process of the desktop has a regular file of it open")


def take_posix_lock(target: Target) -> None:
    """Be the stranger who locks each file in the home's folder `locks` whole that nobody has locked just now.

    The locks are kept for as long as the desktop lives.
    """
    folder = target.root / "home/user/locks"

    def prepare() -> Callable[[], object]:
        taken = 0
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(os.open(path, os.O_RDWR | os.O_NOFOLLOW), fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken += 1
        if not taken:
            raise LookupError("every file is locked already")
        pidfd = os.pidfd_open(target.pid1)
        return lambda: wait_for(pidfd, 60.0)

    stay(prepare)
