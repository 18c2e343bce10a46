"""Another process's descriptors: what they are open on, and their open file descriptions.

Standard library only: the processes that plant faults use it as well. Sources: proc(5), pidfd_getfd(2).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from drums_core.sys.enter import checked, libc

_PIDFD_GETFD = 438  # x86-64


def open_targets(pid: int) -> Iterator[tuple[int, str]]:
    """Each descriptor of a process and what it is open on; what is closed meanwhile is left out.

    Raises:
        FileNotFoundError, ProcessLookupError: the process is gone.
    """
    for fd in sorted(int(x) for x in os.listdir(f"/proc/{pid}/fd")):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield fd, os.readlink(f"/proc/{pid}/fd/{fd}")


def shared_description(pid: int, fd: int) -> int:
    """A descriptor of this process for the very open file description of that one.

    Raises:
        OSError: there is none.
    """
    pidfd = os.pidfd_open(pid)
    try:
        return int(checked(libc.syscall(_PIDFD_GETFD, pidfd, fd, 0), f"pidfd_getfd {pid} {fd}"))
    finally:
        os.close(pidfd)
