"""Timerfds of a desktop's processes; and starting those again that CRIU stops, before the first instruction.

A periodic timerfd that has fired and was not read yet has no time left; the kernel starts it anew as it is read. CRIU
restores it with no time left, which is how a timer is stopped: it would never fire again.

Sources: timerfd_create(2), proc(5), Linux `fs/timerfd.c` (`timerfd_show`, `timerfd_read_iter`), CRIU
`criu/pie/restorer.c` (`timerfd_arm`).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from contextlib import suppress

import attrs

from drums_core.sys.descriptors import open_targets, shared_description
from drums_core.sys.enter import checked, libc

TIMERFD = "anon_inode:[timerfd]"
"""What a descriptor of a timerfd is open on."""
_LINE = re.compile(r"^(clockid|ticks|it_value|it_interval): (.*)$", re.MULTILINE)
_PAIR = re.compile(r"\((\d+), (\d+)\)")
_GONE = (FileNotFoundError, ProcessLookupError)


@attrs.frozen
class Timerfd:
    """A timerfd as its `fdinfo` shows it; times in nanoseconds.

    Args:
        fd: the descriptor.
        clock: the number of its clock.
        left_ns: until it fires; 0 when it is stopped, or has fired and was not read.
        interval_ns: between two times that it fires; 0 for one that fires once.
        fired: whether it has fired and was not read.
    """

    fd: int
    clock: int
    left_ns: int
    interval_ns: int
    fired: bool

    @property
    def to_fire(self) -> bool:
        """Whether it will, or has and was not read."""
        return self.left_ns > 0 or self.fired


def read_timerfd(pid: int, fd: int) -> Timerfd:
    """That behind a descriptor whose target is `TIMERFD`; its process is held or frozen."""
    with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as f:
        fields = dict(_LINE.findall(f.read()))
    left, interval = (_nanoseconds(fields[x]) for x in ("it_value", "it_interval"))
    return Timerfd(fd, int(fields["clockid"]), left, interval, fields["ticks"] != "0")


def timerfds(pid: int) -> list[Timerfd]:
    """Those of a process, which is held or frozen; none of one that is gone."""
    found = []
    with suppress(*_GONE):
        for fd, target in open_targets(pid):
            if target == TIMERFD:
                found.append(read_timerfd(pid, fd))
    return found


def _nanoseconds(text: str) -> int:
    match = _PAIR.fullmatch(text)
    if match is None:
        raise ValueError(f"not a time of a timerfd's fdinfo: {text!r}")
    return int(match[1]) * 10**9 + int(match[2])


def restart_timers(pids: Iterable[int]) -> list[tuple[int, int]]:
    """Start the periodic timerfds again that had fired as they were dumped: they fire at once, as they had. Blocks.

    Args:
        pids: host pids of restored processes, before their first instruction.

    Returns:
        Host pid and descriptor of each.

    Raises:
        OSError: one cannot be reached.
    """
    found = []
    for pid in pids:
        for timer in timerfds(pid):
            if timer.fired and not timer.left_ns and timer.interval_ns:
                fd = shared_description(pid, timer.fd)
                try:
                    times = struct.pack("=4q", *divmod(timer.interval_ns, 10**9), 0, 1)
                    checked(libc.timerfd_settime(fd, 0, times, None), f"timerfd_settime {timer.fd} of {pid}")
                finally:
                    os.close(fd)
                found.append((pid, timer.fd))
    return found
