"""Reaching a process's descriptors from outside: by their open file descriptions, and by calls in its place.

Sources: pidfd_getfd(2), proc(5), ptrace(2).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from drums_core.sys import enter
from drums_core.sys.ptrace import traced

_PIDFD_GETFD = 438  # x86-64


def shared_description(pid: int, fd: int) -> int:
    """A descriptor of this process for the very open file description of that one."""
    pidfd = os.pidfd_open(pid)
    try:
        return int(enter.checked(enter.libc.syscall(_PIDFD_GETFD, pidfd, fd, 0), f"pidfd_getfd {pid} {fd}"))
    finally:
        os.close(pidfd)


def in_place(pid: int, number: int, *arguments: int | bytes) -> None:
    """A system call in a process's place, which must not be frozen."""
    with traced(pid) as tracee:
        numbers = [tracee.write_scratch(x) if isinstance(x, bytes) else x for x in arguments]
        result = tracee.call(number, *numbers)
    if result < 0:
        raise OSError(-result, f"system call {number} in process {pid}: {os.strerror(-result)}")


def open_targets(pid: int) -> Iterator[tuple[int, str]]:
    """Each descriptor of a process, and what it is open on; what is closed meanwhile is left out."""
    for fd in sorted(int(x) for x in os.listdir(f"/proc/{pid}/fd")):
        with contextlib.suppress(FileNotFoundError):
            yield fd, os.readlink(f"/proc/{pid}/fd/{fd}")
