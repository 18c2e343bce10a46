"""What wakes a process: its timers, and its connections to other processes of the desktop.

A process that lost one of them goes on living and does nothing any more: a clock that stands, a window that is drawn no
longer. From outside that looks like waiting, so what is compared is what it waits *for*, while it is held.

Taken: timerfds that are to fire (`fdinfo`), POSIX timers (`/proc/PID/timers`), and both ends of each connected Unix
socket (`unix_diag`, read in the desktop's network namespace). Not to be had from outside: `setitimer`, `alarm`, and
whether a POSIX timer is armed. A timerfd at rest is left out: CRIU lets one with an absolute time fire once, and
nothing is lost by it.

Sources: proc(5), sock_diag(7), Linux `fs/proc/base.c` (`show_timer`), `net/unix/diag.c`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping

import attrs

from drums_core.evidence.processes import read_nspid
from drums_core.model import Json
from drums_core.sys.descriptors import open_targets
from drums_core.sys.inside import in_namespace, open_namespace
from drums_core.sys.timers import TIMERFD, read_timerfd

_GONE = (FileNotFoundError, ProcessLookupError)
_SOCKET = re.compile(r"socket:\[(\d+)\]")
# What notifies is followed by a pid of the reader's namespace, the signal by an address.
_TIMER = re.compile(r"^ID: (\d+)\nsignal: (\d+)/.*\nnotify: (\w+)/.*\nClockID: (\d+)$", re.MULTILINE)
_SHUT = {0: "open", 1: "read end shut", 2: "write end shut", 3: "shut"}
_Place = tuple[int, int]  # pid inside, descriptor


@attrs.frozen
class _Socket:
    peer: int
    shut: int


def read_event_sources(pids: Iterable[int], pid1: int) -> list[list[Json]]:
    """The timers and connections of these processes, to be compared as multisets. Blocks.

    Args:
        pids: host pids of a desktop's processes, which are held or frozen.
        pid1: host pid of its init, whose network namespace the sockets are in.

    Returns:
        Lists of kind, pid inside, descriptor (a POSIX timer's id), and what there is to compare, in words: `timerfd`
        with clock and interval; `timer` with signal, kind of notification and clock;
        `connection` with the other end's pid and descriptor, and which of its ends are shut. A connection whose other
        end no process has (an unaccepted one) is left out.

    Raises:
        OSError: the namespace cannot be entered, or the kernel does not answer.
    """
    found: list[list[Json]] = []
    holders: dict[int, list[_Place]] = {}
    for pid in pids:
        try:
            inside = read_nspid(pid)[-1]
            found += [["timer", inside, *x] for x in _posix_timers(pid)]
            for fd, target in open_targets(pid):
                if match := _SOCKET.fullmatch(target):
                    holders.setdefault(int(match[1]), []).append((inside, fd))
                elif target == TIMERFD and (timer := read_timerfd(pid, fd)).to_fire:
                    words = f"clock {timer.clock}, interval {timer.interval_ns / 1e9:g} s"
                    found.append(["timerfd", inside, fd, words])
        except _GONE:
            continue
    if holders:
        netns_fd = open_namespace(pid1, "net")
        try:
            found += _connections(holders, in_namespace(netns_fd, "net", _unix_sockets))
        finally:
            os.close(netns_fd)
    return sorted(found, key=str)


def _posix_timers(pid: int) -> list[list[Json]]:
    """Id, and in words signal, notification and clock, of each."""
    with open(f"/proc/{pid}/timers", encoding="ascii") as f:
        return [
            [int(number), f"signal {signal}, notified by {notify}, clock {clock}"]
            for number, signal, notify, clock in _TIMER.findall(f.read())
        ]


def _unix_sockets() -> dict[int, _Socket]:
    """The connected Unix sockets of the network namespace that this thread is in, by inode."""
    from pyroute2 import DiagSocket  # 0.15 s: only here
    from pyroute2.netlink.diag import UDIAG_SHOW_PEER
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with DiagSocket() as netlink:
            netlink.bind()
            found = {}
            for message in netlink.get_sock_stats(family=socket.AF_UNIX, show=UDIAG_SHOW_PEER):
                peer = message.get_attr("UNIX_DIAG_PEER")
                if peer:
                    found[message["udiag_ino"]] = _Socket(peer, message.get_attr("UNIX_DIAG_SHUTDOWN") or 0)
            return found
    except NetlinkError as e:  # no OSError in pyroute2
        raise OSError(e.code, f"netlink: {e}") from e


def _connections(holders: Mapping[int, list[_Place]], sockets: Mapping[int, _Socket]) -> list[list[Json]]:
    found: list[list[Json]] = []
    for inode, places in holders.items():
        end = sockets.get(inode)
        if end is None or end.peer not in holders:
            continue
        pid, fd = min(holders[end.peer])
        words = f"to descriptor {fd} of pid {pid}, {_SHUT.get(end.shut, end.shut)}"
        found += [["connection", owner, number, words] for owner, number in places]
    return found


def describe(entry: Iterable[Json]) -> str:
    """One entry in words."""
    kind, pid, number, what = entry
    return f"{kind} {number} of pid {pid} ({what})"
