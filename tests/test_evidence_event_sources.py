"""Timers of each kind and connections, as they are, changed, and gone."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time

from requires import requires

from drums_core.evidence.event_sources import describe, read_event_sources
from drums_core.model import Json
from drums_core.sys.descriptors import shared_description
from drums_core.sys.timers import restart_timers, timerfds

pytestmark = requires("root")
libc = ctypes.CDLL(None)
TFD_IOC_SET_TICKS = 0x40085400  # linux/timerfd.h, as CRIU uses it


def own(kind: str) -> list[Json]:
    """This process's entries of one kind, without kind and pid."""
    return [x[2:] for x in read_event_sources([os.getpid()], os.getpid()) if x[0] == kind and x[1] == os.getpid()]


def times(first_ns: int, interval_s: int) -> bytes:
    """An itimerspec."""
    return struct.pack("=4q", interval_s, 0, *divmod(first_ns, 10**9))


def test_timerfds() -> None:
    """Armed, armed for one time, fired and not yet read; none that is at rest, or was read."""
    fd = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
    try:
        assert own("timerfd") == []
        for first_ns, interval_s, words in ((10**12, 1000, "1000"), (10**12, 0, "0"), (1, 0, "0"), (0, 0, None)):
            assert libc.timerfd_settime(fd, 0, times(first_ns, interval_s), None) == 0
            time.sleep(0.01)
            assert own("timerfd") == ([] if words is None else [[fd, f"clock 1, interval {words} s"]])
        libc.timerfd_settime(fd, 0, times(1, 0), None)
        time.sleep(0.01)
        assert struct.unpack("=Q", os.read(fd, 8)) == (1,)
        assert own("timerfd") == []
    finally:
        os.close(fd)


def test_a_timer_that_was_stopped_as_criu_stops_it_is_started_again() -> None:
    """One that had fired, and has an interval; no other is touched."""
    made = [libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK) for _ in range(4)]
    stopped, once, later, rests = made
    try:
        for fd, first_ns, interval_s in ((stopped, 0, 3600), (once, 0, 0), (later, 10**12, 3600), (rests, 0, 3600)):
            libc.timerfd_settime(fd, 0, times(first_ns, interval_s), None)
        for fd in (stopped, once):
            fcntl.ioctl(fd, TFD_IOC_SET_TICKS, struct.pack("=Q", 1))
        before = {x.fd: x for x in timerfds(os.getpid())}
        assert restart_timers([os.getpid()]) == [(os.getpid(), stopped)]
        time.sleep(0.01)
        assert struct.unpack("=Q", os.read(stopped, 8)) == (1,)
        after = {x.fd: x for x in timerfds(os.getpid())}
        assert 0 < after[stopped].left_ns <= 3600 * 10**9  # it goes on, as one does that has fired by itself
        assert after[later].left_ns <= before[later].left_ns
        assert (after[once], after[rests]) == (before[once], before[rests])
    finally:
        for fd in made:
            os.close(fd)


def test_posix_timers() -> None:
    """Each by its id, with what it sends."""
    made = []
    for number, clock in ((signal.SIGUSR1, time.CLOCK_MONOTONIC), (signal.SIGUSR2, time.CLOCK_REALTIME)):
        timer = ctypes.c_void_p()
        assert libc.timer_create(clock, struct.pack("=qii48x", 0, number, 0), ctypes.byref(timer)) == 0
        made.append(timer)
    try:
        first, second = own("timer")
        assert first[0] != second[0]
        assert sorted([first[1], second[1]]) == [
            "signal 10, notified by signal, clock 1",
            "signal 12, notified by signal, clock 0",
        ]
    finally:
        for timer in made:
            libc.timer_delete(timer)
    assert own("timer") == []


def test_connections() -> None:
    """Both ends, what is shut, another process's end, and none once one end is nobody's."""
    before = own("connection")

    def new() -> list[Json]:
        return [x for x in own("connection") if x not in before]

    ours, theirs = socket.socketpair()
    a, b, pid = ours.fileno(), theirs.fileno(), os.getpid()

    def ends(first: str, second: str) -> list[Json]:
        pairs = [[a, f"to descriptor {b} of pid {pid}, {first}"], [b, f"to descriptor {a} of pid {pid}, {second}"]]
        return sorted(pairs, key=str)

    with ours, theirs:
        assert sorted(new(), key=str) == ends("open", "open")
        with socket.socket(fileno=shared_description(pid, a)) as same:
            same.shutdown(socket.SHUT_WR)
        assert sorted(new(), key=str) == ends("write end shut", "read end shut")
        ours.shutdown(socket.SHUT_RDWR)
        assert sorted(new(), key=str) == ends("shut", "shut")
    assert new() == []

    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        try:
            assert child.stdout and child.stdout.readline()
            fd = theirs.fileno()
            theirs.close()
            found = [x for x in read_event_sources([pid, child.pid], pid) if x[2] in (ours.fileno(), fd)]
            assert ["connection", pid, ours.fileno(), f"to descriptor {fd} of pid {child.pid}, open"] in found
            assert ["connection", child.pid, fd, f"to descriptor {ours.fileno()} of pid {pid}, open"] in found
            assert ours.fileno() not in [x[0] for x in new()]  # the other end is none of the processes asked for
        finally:
            child.communicate()


def test_a_process_that_is_gone() -> None:
    """It has nothing, and is no error."""
    child = subprocess.Popen(["true"])
    child.wait()
    assert read_event_sources([child.pid], os.getpid()) == []


def test_in_words() -> None:
    """One entry."""
    assert describe(["timerfd", 7, 3, "clock 1"]) == "timerfd 3 of pid 7 (clock 1)"
