"""Processes that live, and wait for what will not come: a timer that no longer fires, a display out of reach.

Sources: timerfd_create(2), timer_delete(2), shutdown(2), proc(5).
"""

from __future__ import annotations

import os
import re
import socket
import struct
from pathlib import Path

from drums_core.sys import enter
from drums_core.sys.descriptors import open_targets, shared_description
from drums_core.testing.plant.in_place import in_place
from drums_core.testing.plant.target import Target

_SYS_CLOSE, _SYS_TIMER_DELETE = 3, 226  # x86-64
_DAY_S = 86_400


def change_timerfd(target: Target, program: str, how: str) -> None:
    """Change the timer behind the first timerfd of a program: `stop` it, or let it fire at another `interval`."""
    pid, fd = _descriptor(target, program, "anon_inode:[timerfd]")
    description = shared_description(pid, fd)
    values = (0, 0, 0, 0) if how == "stop" else (_DAY_S, 0, _DAY_S, 0)
    enter.checked(
        enter.libc.timerfd_settime(description, 0, struct.pack("=4q", *values), None), f"timerfd_settime {pid} {fd}"
    )
    os.close(description)


def delete_timer(target: Target, program: str) -> None:
    """Delete a program's first POSIX timer."""
    (pid,) = target.running(program)
    found = re.findall(r"^ID: (\d+)$", Path(f"/proc/{pid}/timers").read_text(), re.MULTILINE)
    if not found:
        raise LookupError(f"{program!r} has no timer")
    in_place(pid, _SYS_TIMER_DELETE, int(found[0]))


def cut_connection(target: Target, program: str, how: str) -> None:
    """Cut a program's first connection: `shut` it both ways, `shut-write` (no request leaves it), or `close` it."""
    pid, fd = _descriptor(target, program, "socket:[")
    if how == "close":
        in_place(pid, _SYS_CLOSE, fd)
        return
    with socket.socket(fileno=shared_description(pid, fd)) as s:
        s.shutdown(socket.SHUT_RDWR if how == "shut" else socket.SHUT_WR)


def _descriptor(target: Target, program: str, begins: str) -> tuple[int, int]:
    (pid,) = target.running(program)
    for fd, path in open_targets(pid):
        if path.startswith(begins):
            return pid, fd
    raise LookupError(f"{program!r} has no descriptor of {begins!r}")
