"""Everything that drums could leave behind on a host, whatever its name, to be equal before and after.

    before = take(state_dir)
    ...
    assert_unchanged(before, state_dir)

What belongs to other programs of the machine, or to another host of drums (one that holds the lock of another state
folder, with desktops of its own), is left out: by descent of its processes, never by name.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from drums_core.leftovers import WORKER_PREFIX

_GONE = (FileNotFoundError, ProcessLookupError, NotADirectoryError)
OWN_PATIENCE_S = 0.2
OTHERS_PATIENCE_S = 5.0
_LISTED_DEPTH = {"slots": 2, "run": 3, "checkpoints": 8, "images": 2, "tmp": 3}
_JOURNAL = "journal.sqlite"  # it is meant to last; and SQLite closes its files when a process's last user is done
_CRIUS = (".criu", "cr-tmpfs", "crtools")  # what it makes in /tmp

_OTHER_HOSTS = "other hosts of drums"  # they make and remove the cgroup that all hosts share

Snapshot = Counter[str]


def _parents() -> dict[int, tuple[int, str]]:
    """Parent and start time of every process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            except _GONE:
                continue
            found[int(name)] = (int(fields[1]), fields[19].decode())
    return found


def _state_folders_of(pid: int) -> set[str]:
    """State folders that a process holds open as a host."""
    found = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.endswith("/host.lock"):
                    found.add(target.removesuffix("/host.lock"))
    except OSError:
        pass
    return found


class _Machine:
    """Whose the processes are, as of now."""

    def __init__(self, state_dir: Path) -> None:
        self.parents = _parents()
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        lockers = {int(x[4]) for x in lines if x[1] == "FLOCK"}  # not who waits for one: `1: -> FLOCK …` (proc(5))
        self.foreign_states: set[str] = set()
        self._foreign_hosts: set[int] = set()
        for pid in lockers:
            if self.descends(pid, {os.getpid()}):
                continue
            states = _state_folders_of(pid) - {str(state_dir)}
            if states:
                self._foreign_hosts.add(pid)
                self.foreign_states |= states
        self._foreign_slots = {
            entry
            for state in self.foreign_states
            if os.path.isdir(f"{state}/slots")
            for entry in os.listdir(f"{state}/slots")
        }
        for root in _cgroup_roots():
            with contextlib.suppress(OSError):
                self._foreign_slots |= {name for name in os.listdir(root / "drums") if self._is_of_another_worker(name)}
        self._foreign_members = {
            pid for root in _cgroup_roots() for name in self._foreign_slots for pid in _members(f"{root}/drums/{name}")
        }

    def descends(self, pid: int, ancestors: set[int]) -> bool:
        seen = set()
        while pid and pid not in seen:
            if pid in ancestors:
                return True
            seen.add(pid)
            pid = self.parents.get(pid, (0, ""))[0]
        return False

    def is_foreign(self, pid: int) -> bool:
        return self.descends(pid, self._foreign_hosts | self._foreign_members)

    def is_foreign_cgroup(self, path: str) -> bool:
        return path.rpartition("/")[2] in self._foreign_slots

    def _is_of_another_worker(self, name: str) -> bool:
        """Whether it is a worker's of another process that lives (`w-PID-START-…`): some wait, and come and go."""
        parts = name.split("-")
        host = int(parts[1]) if name.startswith(WORKER_PREFIX) and len(parts) == 4 else os.getpid()
        return host != os.getpid() and host in self.parents

    def is_ours(self, pid: int) -> bool:
        return pid != os.getpid() and self.descends(pid, {os.getpid()})


def _cgroup_roots() -> list[Path]:
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [Path(fields[1]) for fields in lines if fields[2] in ("cgroup", "cgroup2")]


def _members(top: str) -> set[int]:
    pids: set[int] = set()
    for folder, _, _ in os.walk(top):
        with contextlib.suppress(OSError):
            pids |= {int(x) for x in Path(folder, "cgroup.procs").read_text().split()}
    return pids


def _is_of_another_state(path: str, state_dir: Path) -> bool:
    """Whether a mount point lies in a state folder of drums that is not the one under test, or no longer anywhere."""
    if path.startswith(f"{state_dir}/"):
        return False
    return not os.path.lexists(path) or any(os.path.exists(f"{folder}/host.lock") for folder in Path(path).parents)


def _cgroups(machine: _Machine) -> Iterator[str]:
    for root in _cgroup_roots():
        for folder, names, _ in os.walk(root):
            for name in list(names):
                path = f"{folder}/{name}"
                if machine.is_foreign_cgroup(path):
                    names.remove(name)
                    continue
                members = _members(path)
                others = members and not any(machine.is_ours(pid) for pid in members)
                # One that holds processes is its holders' affair, unless they are a desktop that lost its host.
                if (others and (name != "drums" and "/drums/" not in path)) or (
                    members and all(machine.is_foreign(pid) for pid in members)
                ):
                    names.remove(name)
                else:
                    yield f"cgroup {path}"


def _own_processes(machine: _Machine) -> set[int]:
    pids = {pid for pid in machine.parents if machine.is_ours(pid)}
    for root in _cgroup_roots():
        pids |= {pid for pid in _members(str(root / "drums")) if not machine.is_foreign(pid)}
    return pids & machine.parents.keys()


def _namespaces(pids: set[int]) -> set[str]:
    found = set()
    for pid in {*pids, os.getpid()}:
        with contextlib.suppress(OSError):
            for kind in os.listdir(f"/proc/{pid}/ns"):
                found.add(f"namespace {os.readlink(f'/proc/{pid}/ns/{kind}')}")
    with contextlib.suppress(OSError):
        found |= {f"namespace {name}" for name in os.listdir("/run/netns")}
    return found


def _mounts() -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        root, where, *options = head.split()[3:]
        yield f"mount {where} of {root} {' '.join(options)} - {tail}"


def _files(top: Path, depth: int) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(top), key=lambda e: e.name)
    except OSError:
        return
    for entry in entries:
        yield f"file {entry.path}"
        if depth > 1 and entry.is_dir(follow_symlinks=False) and not os.path.ismount(entry.path):
            yield from _files(Path(entry.path), depth - 1)


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            target = os.readlink(f"/proc/self/fd/{fd}")
            if _JOURNAL not in target:
                yield f"descriptor {fd} {target}"


def take(state_dir: Path, *, descriptors: bool = True, processes: bool = True) -> Snapshot:
    """What there is now.

    Args:
        state_dir: the state folder of the hosts under test; no other program uses it.
        descriptors: whether to count this process's open descriptors.
        processes: whether to count processes and namespaces (a desktop that lives starts and ends some by itself).
    """
    machine = _Machine(state_dir)
    found: Snapshot = Counter(_mounts())
    found.update(_cgroups(machine))
    if machine.foreign_states:
        found[_OTHER_HOSTS] = 1
    found.update(f"link {name}" for name in os.listdir("/sys/class/net"))
    for name, depth in _LISTED_DEPTH.items():
        found.update(_files(state_dir / name, depth))
    found.update(f"file {state_dir / name}" for name in os.listdir(state_dir) if not name.startswith(_JOURNAL))
    found.update(f"file /tmp/{name}" for name in os.listdir("/tmp") if name.startswith(_CRIUS))
    if processes:
        pids = _own_processes(machine)
        found.update(f"process {pid} started {machine.parents[pid][1]}" for pid in pids)
        found.update(_namespaces(pids))
    if descriptors:
        found.update(_descriptors())
    return found


def difference(before: Snapshot, after: Snapshot) -> list[str]:
    """What came (`+`) and what went (`-`)."""
    lines = [f"+ {x}" for x in sorted((after - before).elements())]
    lines += [f"- {x}" for x in sorted((before - after).elements())]
    shared = before[_OTHER_HOSTS] or after[_OTHER_HOSTS]
    return [x for x in lines if x[2:] != _OTHER_HOSTS and not (shared and x.endswith("/drums") and "cgroup" in x)]


def _may_be_others(line: str, state_dir: Path) -> bool:
    """Whether another program of the machine may have brought a difference about."""
    kind = line.split()[1]
    return str(state_dir) not in line and kind not in ("process", "namespace", "descriptor")


def _command(line: str) -> str:
    """A line of a difference, with the command of its process."""
    words = line.split()
    if words[1] != "process":
        return line
    try:
        return f"{line}: {Path(f'/proc/{words[2]}/cmdline').read_bytes()[:200]!r}"
    except OSError:
        return line


def changes(before: Snapshot, state_dir: Path, *, descriptors: bool = True, processes: bool = True) -> list[str]:
    """What differs from `before`.

    What is surely of the hosts under test is looked at again for a moment only (the kernel finishes some things
    after it has said so), the rest for a few seconds, since other programs come and go meanwhile.
    """
    began = time.monotonic()
    while True:
        found = [
            line
            for line in difference(before, take(state_dir, descriptors=descriptors, processes=processes))
            if not (line.split()[1] == "mount" and _is_of_another_state(line.split()[2], state_dir))
            # What went and was not of the hosts under test is no leftover, and another program's affair.
            and not (line.startswith("- ") and str(state_dir) not in line and " descriptor " not in line)
        ]
        patience = OTHERS_PATIENCE_S if all(_may_be_others(line, state_dir) for line in found) else OWN_PATIENCE_S
        if not found or time.monotonic() - began > patience:
            return [_command(line) for line in found]
        time.sleep(0.02)


def assert_unchanged(before: Snapshot, state_dir: Path, *, descriptors: bool = True, processes: bool = True) -> None:
    """Raise AssertionError with everything that came or went since `before`."""
    found = changes(before, state_dir, descriptors=descriptors, processes=processes)
    assert not found, "not as before:\n" + "\n".join(found)
