"""Who brought a checker's failure about, as far as evidence on the host shows it.

A policy that cannot solve a task may make its checker fail instead: it fills a limit, or kills what the checker needs.
That gives no score, and would read like a fault of the machine. So when there is no score, the desktop as the agent
left it is looked at: limits that are full, a session whose parts have ended or are stopped, ports on which nothing
listens any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from drums_core.desktop import Desktop
from drums_core.evidence.processes import is_running, read_stat
from drums_core.model import Cause

_FULL = 0.95
# The desktop's own; its home lies on the host's file system, which others fill too.
_FOLDERS = ("tmp", "run", "dev/shm")
_STOPPED = ("T", "t")
_LISTEN = "0A"


def listening(pid: int) -> frozenset[int]:
    """The TCP ports that are listened on in a process's network namespace (proc_pid_net(5)); none once it is gone."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{pid}/net/{name}", encoding="ascii") as f:
                lines = [line.split() for line in f]
        except OSError:
            continue
        found |= {int(line[1].rpartition(":")[2], 16) for line in lines[1:] if line[3] == _LISTEN}
    return frozenset(found)


def closed(listened: frozenset[int], now: frozenset[int], asked: frozenset[int]) -> frozenset[int]:
    """The ports whose programs have ended on which an answer may have depended.

    Args:
        listened: those that were listened on when the agent began.
        now: those that are.
        asked: those that gave no answer. One that is listened on still may lead to any other, as a task's `socat` leads
            to the browser's own port; one that is not stands for itself alone.
    """
    gone = listened - now
    return gone if asked & now else gone & asked


def blame(
    desktop: Desktop, *, acted: bool, listened: frozenset[int], asked: frozenset[int]
) -> tuple[Cause | None, list[str]]:
    """The cause of a failure, None when nothing shows it, with the evidence in words. Blocks.

    Args:
        desktop: the desktop whose checker failed, as it is now.
        acted: whether an agent has acted in it.
        listened: ports that were listened on when it began.
        asked: ports of the desktop that the failure is about.
    """
    found = [*_limits(desktop), *_folders(desktop), *_session(desktop)]
    for port in sorted(closed(listened, listening(desktop.pid1), asked)):
        found.append(f"nothing listens on port {port}, as a program did when the agent began")
    if not found:
        return None, []
    return (Cause.AGENT if acted else Cause.INFRASTRUCTURE), found


def _limits(desktop: Desktop) -> Iterator[str]:
    try:
        pids, memory = desktop.cgroup.pids_in_use(), desktop.cgroup.memory_in_use()
    except OSError:
        return  # it is being torn down
    if pids >= _FULL * desktop.limits.pids:
        yield f"the desktop has {pids} processes and threads, allowed are {desktop.limits.pids}"
    if memory >= _FULL * desktop.limits.memory_bytes:
        yield f"the desktop's processes hold {memory >> 20} MiB, allowed are {desktop.limits.memory_bytes >> 20}"


def _folders(desktop: Desktop) -> Iterator[str]:
    for name in _FOLDERS:
        try:
            size = os.statvfs(f"/proc/{desktop.pid1}/root/{name}")
        except OSError:
            continue
        if size.f_blocks and size.f_bavail <= (1 - _FULL) * size.f_blocks:
            yield f"/{name} is full: {size.f_bavail * size.f_frsize >> 10} KiB are left"
        elif size.f_files and size.f_favail <= (1 - _FULL) * size.f_files:
            yield f"/{name} is full: {size.f_favail} of {size.f_files} inodes are left"


def _session(desktop: Desktop) -> Iterator[str]:
    for process in desktop.session:
        if not is_running(process.host_pid, process.start_ticks):
            yield f"{process.command!r} of the session has ended"
            continue
        try:
            state = read_stat(process.host_pid).state
        except OSError:
            continue
        if state in _STOPPED:
            yield f"{process.command!r} of the session is stopped"
