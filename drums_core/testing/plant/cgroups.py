"""A cgroup that is not the desktop's alone, not all of it, or not as limited as asked for.

Sources: the kernel's `cgroup-v1/memory.rst`, `cgroup-v2.rst`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from drums_core.sys import enter
from drums_core.testing.plant.target import NotHere, Target, reap, sleeper, stay, wait_for

_PAGE = 4096


def move_in_stranger(target: Target, unshare: Sequence[str], init: bool = False) -> None:
    """Put a process that has nothing to do with the desktop into its cgroup; it dies with the desktop.

    Args:
        unshare: kinds of namespaces that it has of its own; the others are the host's.
        init: let it be pid 1 of its pid namespace.
    """

    def prepare() -> Callable[[], object]:
        if unshare:
            enter.unshare(unshare)
        outside = 0 if init or "pid" not in unshare else sleeper()  # pid 1 of the new namespace
        child = sleeper()
        target.join(child)

        def work() -> None:
            reap(child)
            if outside:
                os.kill(outside, 9)
                reap(outside)

        return work

    stay(prepare)


def _without_freezer(paths: Sequence[Path]) -> list[Path]:
    # A version 1 freezer of its own would let the process run.
    return [path for path in paths if not (path / "freezer.state").exists()]


def move_out(target: Target, command: str, controller: str = "") -> None:
    """Move a process of the desktop to the parent cgroup, of one controller (version 1) or of all."""
    pid = target.named(command)
    paths = [
        path for path in _without_freezer(target.cgroups) if not controller or (path / f"{controller}.max").exists()
    ]
    if controller and len(target.cgroups) < 2:
        raise NotHere("this host's cgroups have one hierarchy")
    for path in paths:
        if (path / "cgroup.controllers").exists():  # version 2: a parent that hands controllers on takes no process
            _stay_in([path.parent / f"{path.name}-astray"], [pid])
        else:
            (path.parent / "cgroup.procs").write_text(str(pid))


def move_to_other(target: Target, command: str) -> None:
    """Move a process of the desktop to another desktop's cgroup."""
    pid = target.named(command)
    for path in _without_freezer(target.other_cgroups):
        (path / "cgroup.procs").write_text(str(pid))


def move_to_other_parent(target: Target, parent: str) -> None:
    """Move the whole desktop into a cgroup of its own name below another parent, which goes with the desktop."""
    folders = [path.parent.parent / parent / path.name for path in _without_freezer(target.cgroups)]
    _stay_in(folders, target.pids(), let_go=[folder.parent for folder in folders])


def _stay_in(folders: Sequence[Path], pids: Sequence[int], let_go: Sequence[Path] = ()) -> None:
    """Move these processes into cgroups that are made now and go when the processes have, and then `let_go`."""

    def prepare() -> Callable[[], object]:
        for folder in folders:
            folder.mkdir(parents=True)
            for pid in pids:
                (folder / "cgroup.procs").write_text(str(pid))
        pidfds = [os.pidfd_open(pid) for pid in pids]

        def work() -> None:
            for pidfd in pidfds:
                wait_for(pidfd, 120.0)
            for folder in folders:
                _remove(folder)
            for folder in let_go:
                with contextlib.suppress(OSError):  # others are below it too
                    folder.rmdir()

        return work

    stay(prepare)


def move_below(target: Target, command: str) -> None:
    """Move a process of the desktop to a cgroup below the desktop's, which goes with the desktop."""
    pid = target.named(command)
    folders = [path / "below" for path in _without_freezer(target.cgroups)]
    _stay_in(folders, [pid])


def change_memory_limit(target: Target, pages: int) -> None:
    """Let the memory limit be some pages off, and memory and swap together as many."""
    for path in target.cgroups:
        if (path / "memory.max").exists():
            _add(path / "memory.max", pages * _PAGE)
            return
        if (path / "memory.limit_in_bytes").exists():
            names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]  # the latter is never the smaller one
            for name in names if pages < 0 else reversed(names):
                if (path / name).exists():
                    _add(path / name, pages * _PAGE)
            return
    raise NotHere("the desktop has no memory cgroup")


def change_swap_limit(target: Target, pages: int) -> None:
    """Let the desktop have some pages more of swap."""
    for path in target.cgroups:
        for name in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            if (path / name).exists():
                _add(path / name, pages * _PAGE)
                return
    raise NotHere("this kernel does not limit swap")


def change_cpu_limit(target: Target, quota_us: int) -> None:
    """Let the CPU quota be some microseconds of each period off; 0 is no limit at all."""
    for path in target.cgroups:
        if (path / "cpu.max").exists():
            quota, period = (path / "cpu.max").read_text().split()
            (path / "cpu.max").write_text(f"{int(quota) + quota_us if quota_us else 'max'} {period}")
            return
        if (path / "cpu.cfs_quota_us").exists():
            file = path / "cpu.cfs_quota_us"
            file.write_text(str(int(file.read_text()) + quota_us if quota_us else -1))
            return
    raise NotHere("the desktop has no cpu cgroup")


def change_pids_limit(target: Target, by: int) -> None:
    """Let the limit of processes be off."""
    for path in target.cgroups:
        if (path / "pids.max").exists():
            _add(path / "pids.max", by)
            return
    raise NotHere("the desktop has no pids cgroup")


def _remove(folder: Path) -> None:
    while folder.exists():
        with contextlib.suppress(OSError):  # its last process is still dying
            folder.rmdir()


def _add(file: Path, by: int) -> None:
    file.write_text(str(int(file.read_text()) + by))
