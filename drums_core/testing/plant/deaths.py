"""Processes that end, are replaced, or run out of memory.

Sources: signal(7), clone3(2), pthreads(7), the kernel's `admin-guide/mm/concepts.rst` on the OOM killer.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

from drums_core.sys import enter
from drums_core.testing.plant.isolation import KINDS
from drums_core.testing.plant.target import Target, reap, sleeper, stay, wait_for

_SYS_CLONE3 = 435
_PR_SET_NAME = 15
_FAR_PID = 10_000


def kill(target: Target, command: str, sig: str, wait: bool = True) -> None:
    """Send a signal to one of the desktop's processes, and wait for its end unless it is held."""
    pid = target.named(command)
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.Signals[sig])
    if wait and not wait_for(pidfd, 10.0):
        raise OSError(f"{command!r} did not end of {sig}")


def kill_later(target: Target, command: str, sig: str, delay_s: float) -> None:
    """Send a signal to one of the desktop's processes `delay_s` after the request was made; this returns at once."""

    def prepare() -> Callable[[], object]:
        pidfd = os.pidfd_open(target.named(command))

        def work() -> None:
            if not wait_for(pidfd, max(0.0, target.asked_at + delay_s - time.monotonic())):
                signal.pidfd_send_signal(pidfd, signal.Signals[sig])

        return work

    stay(prepare)


def tell(target: Target, program: str, sig: str, ends: bool) -> None:
    """Send a signal to a program of the stage, and wait until it, or its first thread alone, has ended of it."""
    (pid,) = target.running(program)
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.Signals[sig])
    if ends:
        if not wait_for(pidfd, 10.0):
            raise OSError(f"{program!r} did not end of {sig}")
        return
    deadline = time.monotonic() + 10.0
    while b") Z" not in Path(f"/proc/{pid}/stat").read_bytes():
        if time.monotonic() > deadline:
            raise OSError(f"the first thread of {program!r} did not end")
        time.sleep(0.01)


def replace(target: Target, command: str) -> None:
    """Kill a process, and put another one with its name and its pid inside in its place."""
    pid = target.named(command)
    status = Path(f"/proc/{pid}/status").read_text()
    inside = int(status.partition("\nNSpid:")[2].splitlines()[0].split()[-1])
    _hand_out_above(target, _FAR_PID)
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    wait_for(pidfd, 10.0)
    deadline = time.monotonic() + 10.0
    while Path(f"/proc/{pid}").exists():  # until its parent has reaped it, the pid is taken
        if time.monotonic() > deadline:
            raise OSError(f"nobody reaps {command!r}")
        time.sleep(0.01)

    def prepare() -> Callable[[], object]:
        fds = [(target.namespace(kind), kind) for kind in KINDS]
        enter.setns(fds[0][0], "pid")  # for children

        def enter_all() -> None:
            for fd, kind in fds[1:]:
                enter.setns(fd, kind)
            enter.libc.prctl(_PR_SET_NAME, command.encode(), 0, 0, 0)

        child = sleeper(enter_all, fork=lambda: _fork_as(inside))
        target.join(child)
        return lambda: reap(child)

    stay(prepare)


def _hand_out_above(target: Target, pid: int) -> None:
    """Have the desktop's next processes get higher pids than this.

    CRIU asks for each pid by number, which leaves the counter of a restored pid namespace at its start: the next
    process that the desktop starts would take the very number that becomes free.

    Source: `ns_last_pid` in the kernel's `admin-guide/sysctl/kernel.rst`; it is that of the writer's own pid namespace.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            enter.setns(target.namespace("pid"), "pid")  # for children
            if writer := os.fork():
                code = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
            else:
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid))
                code = 0
        finally:
            os._exit(code)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(f"the counter of pids was not set: exit code {code}")


def _fork_as(inner_pid: int) -> int:
    """A fork whose child has this pid in the pid namespace of children (clone3(2), `set_tid`)."""
    wanted = (ctypes.c_int * 1)(inner_pid)
    arguments = struct.pack("=11Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(wanted), 1, 0)
    return int(enter.checked(enter.libc.syscall(_SYS_CLONE3, arguments, len(arguments)), f"clone3 as {inner_pid}"))


def fill_memory(target: Target, generations: int = 0) -> None:
    """Fill the desktop's memory from a process in its cgroup until the kernel kills that process.

    Args:
        generations: how many processes are between this one and the one that fills it.
    """
    child = os.fork()
    if not child:
        target.join(os.getpid())
        for _ in range(generations):
            if below := os.fork():
                os._exit(1 if os.waitstatus_to_exitcode(os.waitpid(below, 0)[1]) else 0)
        Path("/proc/self/oom_score_adj").write_text("1000")
        hoard = []
        while True:
            hoard.append(b"x" * (8 << 20))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != (1 if generations else -signal.SIGKILL):
        raise OSError(f"the process that fills the memory was not killed: {code}")


def fill_other_memory(target: Target) -> None:
    """`fill_memory` in the other desktop's cgroup."""
    fill_memory(Target(target.other_pid1, "", [str(x) for x in target.other_cgroups], 0, [], target.asked_at))
