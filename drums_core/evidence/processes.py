"""Processes and their namespaces, from proc.

psutil knows neither the pid inside a namespace nor the namespaces, and one read of `/proc/PID/stat` has to give the
name, the state and the start time together, so proc is read here.

Sources: proc(5), pid_namespaces(7), namespaces(7), Linux `fs/proc/array.c`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import attrs

from drums_core.model import ProcessIdentity

NAMESPACES = ("pid", "mnt", "net", "ipc", "uts", "user", "time")
_GONE = (FileNotFoundError, ProcessLookupError)


@attrs.frozen
class ProcessStat:
    """The parts of `/proc/PID/stat` that identify a process, from one read."""

    command: str
    state: str
    parent: int
    threads: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        """Whether it runs: no zombie, not dead. A process lives on after its first thread ended."""
        return self.state not in ("Z", "X", "x") or self.threads > 1


def read_stat(pid: int) -> ProcessStat:
    """`/proc/PID/stat`; the command may hold blanks, parentheses and newlines.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as f:
        data = f.read()
    head, _, tail = data.rpartition(b")")
    fields = tail.split()
    if len(fields) < 20:
        raise ProcessLookupError(f"process {pid} has no stat")
    return ProcessStat(
        command=os.fsdecode(head.partition(b"(")[2]),
        state=fields[0].decode(),
        parent=int(fields[1]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
    )


def read_nspid(pid: int) -> list[int]:
    """The process's pid in each pid namespace from the reader's inwards (`NSpid`).

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
    """
    with open(f"/proc/{pid}/status", "rb") as f:
        for line in f:
            if line.startswith(b"NSpid:"):
                return [int(x) for x in line.split()[1:]]
    raise ProcessLookupError(f"process {pid} has no NSpid")


def read_argv(pid: int) -> tuple[str, ...]:
    """The command line; empty for kernel threads and zombies."""
    with open(f"/proc/{pid}/cmdline", "rb") as f:
        data = f.read()
    parts = data.split(b"\0")
    if data.endswith(b"\0"):
        parts.pop()
    return tuple(os.fsdecode(x) for x in parts) if data else ()


def read_uid(pid: int) -> int:
    """The real user id, as the reader's user namespace numbers it.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
    """
    with open(f"/proc/{pid}/status", "rb") as f:
        for line in f:
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    raise ProcessLookupError(f"process {pid} has no user id")


def read_executable(pid: int) -> str:
    """The path of the program that the process runs, as its own mount namespace names it."""
    return os.readlink(f"/proc/{pid}/exe")


def read_processes(pids: Iterable[int]) -> list[ProcessIdentity]:
    """The live ones of these processes, by pid inside; those that vanish, zombies and dead ones are left out."""
    found = []
    for pid in pids:
        try:
            stat = read_stat(pid)
            if not stat.alive:
                continue
            identity = ProcessIdentity(
                inner_pid=read_nspid(pid)[-1],
                command=stat.command,
                argv=read_argv(pid),
                host_pid=pid,
                start_ticks=stat.start_ticks,
            )
            if read_stat(pid).start_ticks == stat.start_ticks:  # the pid did not go to another process meanwhile
                found.append(identity)
        except _GONE:
            continue
    return sorted(found)


def is_running(host_pid: int, start_ticks: int) -> bool:
    """Whether exactly this process lives: same pid, same start time, neither zombie nor dead."""
    try:
        stat = read_stat(host_pid)
    except _GONE:
        return False
    return stat.start_ticks == start_ticks and stat.alive


def is_alive(host_pid: int) -> bool:
    """Whether this pid is a process that is neither zombie nor dead."""
    try:
        return read_stat(host_pid).alive
    except _GONE:
        return False


def namespace_inodes(pid: int | str) -> dict[str, int]:
    """The inode of each namespace of `NAMESPACES` that the process is in (`self` is the reader).

    `time` is the namespace that the process itself is in, not the one of its children to come. A kind that this
    kernel does not have is left out.

    Raises:
        ProcessLookupError: there is no such process.
    """
    found = {}
    for kind in NAMESPACES:
        try:
            found[kind] = os.stat(f"/proc/{pid}/ns/{kind}").st_ino
        except FileNotFoundError:
            if not os.path.exists(f"/proc/self/ns/{kind}"):
                continue
            raise ProcessLookupError(f"process {pid} is gone, or has no {kind} namespace any more") from None
    return found


def processes_in_pidns(inode: int) -> list[int]:
    """Host pids of all live processes in the pid namespace with this inode.

    Raises:
        PermissionError: a process of a nested pid namespace, which could be the one asked for, cannot be read.
    """
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        pid = int(name)
        try:
            if os.stat(f"/proc/{pid}/ns/pid").st_ino == inode and read_stat(pid).alive:
                found.append(pid)
        except _GONE:
            continue
        except PermissionError:
            # Some hosts hide their own pid 1 even from root; it is in the reader's pid namespace, not below it.
            try:
                nested = len(read_nspid(pid)) > 1
            except _GONE:
                continue
            if nested:
                raise
    return sorted(found)


def descends_from(pid1: int, pids: Iterable[int]) -> frozenset[int]:
    """Those of `pids` that are `pid1` or its descendants.

    A process entered from outside that is still its helper's child is none: CRIU would silently leave it out.
    """
    parents: dict[int, int] = {}

    def parent(pid: int) -> int:
        if pid not in parents:
            try:
                parents[pid] = read_stat(pid).parent
            except _GONE:
                parents[pid] = 0
        return parents[pid]

    found = set()
    for pid in pids:
        seen: set[int] = set()
        ancestor = pid
        while ancestor and ancestor != pid1 and ancestor not in seen:
            seen.add(ancestor)
            ancestor = parent(ancestor)
        if ancestor == pid1:
            found.add(pid)
    return frozenset(found)
