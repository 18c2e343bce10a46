"""What every action has: the desktop by the kernel's names, and processes that stay behind.

Sources: proc(5), pidfd_open(2), pid_namespaces(7).
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from pathlib import Path


class NotHere(Exception):
    """This host has no such thing (a kind of link, a controller), so the fault cannot be made on it."""


class Target:
    """The desktop as its `Interposition` names it.

    Args:
        pid1: host pid of its init.
        root: its file tree on the host.
        cgroups: its cgroup directories.
        other_pid1: host pid of another desktop's init, 0 when there is none.
        other_cgroups: that one's cgroup directories.
        asked_at: when the fault was asked for, by the monotonic clock, which is the machine's.
    """

    def __init__(
        self, pid1: int, root: str, cgroups: list[str], other_pid1: int, other_cgroups: list[str], asked_at: float
    ) -> None:
        self.pid1 = pid1
        self.root = Path(root)
        self.cgroups = [Path(x) for x in cgroups]
        self.other_pid1 = other_pid1
        self.other_cgroups = [Path(x) for x in other_cgroups]
        self.asked_at = asked_at

    def pids(self) -> list[int]:
        """Its processes: those of its cgroup in its pid namespace (CRIU may still be in the former)."""
        inside = os.stat(f"/proc/{self.pid1}/ns/pid").st_ino
        found = []
        for pid in sorted(int(x) for x in (self.cgroups[0] / "cgroup.procs").read_text().split()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if os.stat(f"/proc/{pid}/ns/pid").st_ino == inside:
                    found.append(pid)
        return found

    def named(self, command: str) -> int:
        """The first process with this command name."""
        for pid in self.pids():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == command:
                    return pid
        raise LookupError(f"no process {command!r} among {len(self.pids())} of the desktop")

    def running(self, program: str) -> list[int]:
        """The processes that have this word in their command line."""
        return [p for p in self.pids() if program.encode() in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0")]

    def namespace(self, kind: str, *, of_other: bool = False) -> int:
        """A descriptor of one of its namespaces, or of the other desktop's."""
        if of_other and not self.other_pid1:
            raise LookupError("there is no other desktop")
        return os.open(f"/proc/{self.other_pid1 if of_other else self.pid1}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)

    def join(self, pid: int) -> None:
        """Move a process into the desktop's cgroup."""
        for path in self.cgroups:
            (path / "cgroup.procs").write_text(str(pid))


def sleeper(before: Callable[[], None] = lambda: None, *, fork: Callable[[], int] = os.fork) -> int:
    """A child that has done `before` and does nothing until it is killed.

    It holds no descriptor when this returns: in a frozen cgroup it could let go of none.

    Args:
        fork: makes the child, as `os.fork` does.
    """
    read_fd, write_fd = os.pipe()
    child = fork()
    if child:
        os.close(write_fd)
        with open(read_fd, encoding="utf-8") as f:
            problem = f.read()
        if problem:
            raise OSError(problem)
        return child
    try:
        before()
        silence()
        os.closerange(3, write_fd)
        os.closerange(write_fd + 1, 1024)
        os.close(write_fd)
        while True:
            time.sleep(3600)
    except BaseException as e:  # noqa: BLE001 - told to the parent
        os.write(write_fd, f"{type(e).__name__}: {e}".encode())
    finally:
        os._exit(1)


def reap(child: int) -> None:
    """Wait for a child's end."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def wait_for(pidfd: int, timeout_s: float) -> bool:
    """Whether a process ended within the time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def silence() -> None:
    """Let go of the standard streams."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def stay(prepare: Callable[[], Callable[[], object]]) -> None:
    """Do `prepare` in a process of its own, return when it is done, and let that process do what it returned.

    It is also the parent that reaps what `prepare` started, so that the end of a pid namespace waits for nobody.
    """
    read_fd, write_fd = os.pipe()
    if os.fork():
        os.close(write_fd)
        with open(read_fd, encoding="utf-8") as f:
            answer = f.read()
        if answer != "done":
            raise OSError(answer or "the process ended early")
        return
    os.close(read_fd)
    os.setsid()
    try:
        then = prepare()
        silence()
        os.write(write_fd, b"done")
        os.close(write_fd)
        then()
    except BaseException as e:  # noqa: BLE001 - told to the parent
        with contextlib.suppress(OSError):
            os.write(write_fd, f"{type(e).__name__}: {e}".encode())
        os._exit(1)
    os._exit(0)
