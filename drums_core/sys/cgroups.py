"""A desktop's own cgroup, on version 2 and on version 1 (hybrid) hosts.

Sources: the kernel's `cgroup-v2.rst`, `cgroup-v1/memory.rst`, `cgroup-v1/freezer-subsystem.rst`,
`scheduler/sched-bwc.rst`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from drums_core.model import KernelLimits, Limits

PARENT = "drums"
CPU_PERIOD_US = 100_000
PARENT_TRIES = 10
APART = "apart"
V1_CONTROLLERS = ("memory", "cpu", "pids", "freezer")
_V2_ROOT = Path("/sys/fs/cgroup")


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def _write(path: Path, value: object) -> None:
    # One write(2) per value: the kernel parses each write on its own, and reports refusal there.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    except OSError as e:
        raise OSError(e.errno, f"writing {value!r} to {path}: {e.strerror}") from e
    finally:
        os.close(fd)


# Version 1 has no word for it: the greatest number of whole pages (PAGE_COUNTER_MAX) means no limit.
_V1_UNLIMITED_BYTES = (1 << 63) - 4096


def _number(text: str) -> int | None:
    return None if text == "max" else int(text)


def _v1_bytes(text: str) -> int | None:
    number = int(text)
    return number if number < _V1_UNLIMITED_BYTES else None


def _is_dead(pid: int) -> bool:
    """Whether a process is a zombie or gone; one whose first thread alone has ended lives on in the others."""
    if _state(pid) not in "ZX":
        return False
    try:
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _controller_mounts() -> dict[str, Path]:
    mounts: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, fstype, options, *_ = line.split()
        if fstype == "cgroup":
            for name in set(options.split(",")) & set(V1_CONTROLLERS):
                mounts.setdefault(name, Path(where))
    return mounts


def _own_v2_cgroup() -> str:
    """This process's cgroup on version 2, below the mount point (cgroups(7), `/proc/PID/cgroup`)."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        if line.startswith("0::/"):
            return line.removeprefix("0::/")
    raise OSError("this process has no cgroup of version 2")


def host_version() -> int:
    """2 where memory, cpu and pids are bound to the unified hierarchy, else 1.

    Raises:
        OSError: neither version offers the controllers that a desktop needs.
    """
    controllers = _V2_ROOT / "cgroup.controllers"
    if controllers.exists() and {"memory", "cpu", "pids"} <= set(_read(controllers).split()):
        return 2
    missing = set(V1_CONTROLLERS) - set(_controller_mounts())
    if missing:
        raise OSError(f"no cgroup controller {', '.join(sorted(missing))} on this host, neither version 2 nor 1")
    return 1


@attrs.frozen
class Cgroup:
    """One desktop's cgroup: a directory on version 2, one per controller on version 1."""

    name: str
    directories: Mapping[str, Path]  # controller -> directory; "" alone on version 2

    @property
    def paths(self) -> Sequence[Path]:
        """The distinct directories."""
        return tuple(dict.fromkeys(self.directories.values()))

    @property
    def is_v2(self) -> bool:
        """Whether this is a version 2 cgroup."""
        return "" in self.directories

    @property
    def apart(self) -> Cgroup:
        """A part of it that is frozen and thawed on its own, once `set_apart` has made it."""
        controller = "" if self.is_v2 else "freezer"
        found = {c: path / APART for c, path in self.directories.items() if c == controller}
        return Cgroup(f"{self.name}/{APART}", found)

    @property
    def exists(self) -> bool:
        """Whether any of its directories is there."""
        return any(path.is_dir() for path in self.paths)

    def set_apart(self, pids: Iterable[int]) -> None:
        """Move these processes, frozen with all others, into the part of it that stays frozen when it is thawed."""
        apart = self.apart
        for path in apart.paths:
            path.mkdir(exist_ok=True)
        apart.freeze()
        for pid in pids:
            for path in apart.paths:
                with contextlib.suppress(ProcessLookupError):
                    _write(path / "cgroup.procs", pid)

    def _file(self, controller: str, name: str) -> Path:
        return self.directories["" if self.is_v2 else controller] / name

    def pids(self) -> frozenset[int]:
        """Host pids of the live processes in it, zombies left out."""
        inside = frozenset[int]().union(*self.members().values())
        return inside | self.apart.pids() if self.apart.exists else inside

    def members(self) -> Mapping[Path, frozenset[int]]:
        """Live processes by directory."""
        out = {}
        for path in self.paths:
            try:
                listed = _read(path / "cgroup.procs").split()
            except FileNotFoundError:
                listed = []
            out[path] = frozenset(int(p) for p in listed if not _is_dead(int(p)))
        return out

    def write_limits(self, limits: Limits, *, cpu: bool = True) -> None:
        """Write the limits; without `cpu`, CPU time stays unlimited (CRIU works in the cgroup during a restore)."""
        quota = round(limits.cpus * CPU_PERIOD_US)  # 0.29 * 100_000 is 28999.999…
        if self.is_v2:
            _write(self._file("memory", "memory.max"), limits.memory_bytes)
            _write(self._file("memory", "memory.swap.max"), limits.swap_bytes)
            _write(self._file("pids", "pids.max"), limits.pids)
            _write(self._file("cpu", "cpu.max"), f"{quota if cpu else 'max'} {CPU_PERIOD_US}")
            return
        both = limits.memory_bytes + limits.swap_bytes
        sizes = [("memory.limit_in_bytes", limits.memory_bytes), ("memory.memsw.limit_in_bytes", both)]
        # The kernel holds memory <= memory and swap together at every moment (cgroup-v1/memory.rst, 5).
        if limits.memory_bytes > int(_read(self._file("memory", "memory.memsw.limit_in_bytes"))):
            sizes.reverse()
        for name, size in sizes:
            _write(self._file("memory", name), size)
        _write(self._file("pids", "pids.max"), limits.pids)
        _write(self._file("cpu", "cpu.cfs_period_us"), CPU_PERIOD_US)
        _write(self._file("cpu", "cpu.cfs_quota_us"), quota if cpu else -1)

    def read_limits(self) -> KernelLimits:
        """The limits as the kernel reads them back."""
        if self.is_v2:
            quota, period = _read(self._file("cpu", "cpu.max")).split()
            return KernelLimits(
                cpus=None if quota == "max" else int(quota) / int(period),
                memory_bytes=_number(_read(self._file("memory", "memory.max"))),
                swap_bytes=_number(_read(self._file("memory", "memory.swap.max"))),
                pids=_number(_read(self._file("pids", "pids.max"))),
            )
        memory = _v1_bytes(_read(self._file("memory", "memory.limit_in_bytes")))
        both = _v1_bytes(_read(self._file("memory", "memory.memsw.limit_in_bytes")))
        quota_us = int(_read(self._file("cpu", "cpu.cfs_quota_us")))
        return KernelLimits(
            cpus=None if quota_us < 0 else quota_us / int(_read(self._file("cpu", "cpu.cfs_period_us"))),
            memory_bytes=memory,
            swap_bytes=None if both is None or memory is None else both - memory,
            pids=_number(_read(self._file("pids", "pids.max"))),
        )

    def oom_kills(self) -> int:
        """How many processes the out-of-memory killer has taken in it since it was made."""
        text = _read(self._file("memory", "memory.events" if self.is_v2 else "memory.oom_control"))
        for line in text.splitlines():
            key, value = line.split()
            if key == "oom_kill":
                return int(value)
        raise OSError(f"no oom_kill counter for cgroup {self.name!r}; Linux 4.13 or newer is needed")

    def pids_in_use(self) -> int:
        """How many processes and threads the kernel counts in it."""
        return int(_read(self._file("pids", "pids.current")))

    def memory_in_use(self) -> int:
        """Bytes that only its processes can give back: their own memory and shared memory, without cached files."""
        wanted = {"anon", "shmem"} if self.is_v2 else {"total_rss", "total_shmem"}
        lines = (line.split() for line in _read(self._file("memory", "memory.stat")).splitlines())
        return sum(int(line[1]) for line in lines if line[0] in wanted)

    def freeze(self, *, timeout_s: float = 5.0) -> None:
        """Freeze every process; blocks until the kernel says so.

        Raises:
            TimeoutError: some process could not be frozen.
        """
        self._set_frozen(True, timeout_s)

    def thaw(self, *, timeout_s: float = 5.0) -> None:
        """Let frozen processes go on."""
        self._set_frozen(False, timeout_s)

    def _set_frozen(self, frozen: bool, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._tell(frozen)
        if self.is_v2:
            state, wanted = self._file("", "cgroup.events"), f"frozen {int(frozen)}"
        else:
            state, wanted = self._file("freezer", "freezer.state"), "FROZEN" if frozen else "THAWED"
        while wanted not in _read(state).splitlines():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"cgroup {self.name!r} is not {'frozen' if frozen else 'thawed'} after {timeout_s} s"
                )
            time.sleep(0.0005)

    def _tell(self, frozen: bool) -> None:
        if self.is_v2:
            _write(self._file("", "cgroup.freeze"), int(frozen))
        else:
            _write(self._file("freezer", "freezer.state"), "FROZEN" if frozen else "THAWED")

    def evict(self, pid: int) -> None:
        """Move a process (CRIU itself) out of it: to the parent, or on version 2 to this process's own cgroup.

        There the parent hands its controllers on, and so takes no process itself (cgroup-v2.rst, "No Internal Process
        Constraint").
        """
        for path in self.paths:
            folder = _V2_ROOT / _own_v2_cgroup() if self.is_v2 else path.parent
            _write(folder / "cgroup.procs", pid)

    def kill(self) -> None:
        """Send SIGKILL to every process in it, once; frozen processes die when thawed."""
        if self.is_v2:
            _write(self._file("", "cgroup.kill"), 1)
            return
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.apart.exists:
            self.apart._tell(False)  # what is in it dies once the whole is thawed

    def remove(self) -> bool:
        """Remove its directories; False while the kernel still counts a process in one of them."""
        gone = True
        for path in [*self.apart.paths, *self.paths]:
            try:
                os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError:
                gone = False
        return gone


def _make_below_parent(path: Path) -> None:
    """Make a cgroup directory and, if need be, `drums` above it, which another host may be removing just now."""
    for _ in range(PARENT_TRIES):
        with contextlib.suppress(FileNotFoundError):
            path.mkdir(parents=True)
            return
    raise OSError(f"{str(path)!r} cannot be made: its parent is removed each time")


def create_cgroup(name: str) -> Cgroup:
    """Make the cgroup `drums/NAME`.

    Raises:
        OSError: the kernel refused.
    """
    if host_version() == 2:
        parent = _V2_ROOT / PARENT
        # Controllers reach a cgroup only through every ancestor's subtree_control (cgroup-v2.rst, "Enabling").
        _write(_V2_ROOT / "cgroup.subtree_control", "+cpu +memory +pids")
        parent.mkdir(exist_ok=True)
        _write(parent / "cgroup.subtree_control", "+cpu +memory +pids")
        cgroup = Cgroup(name, {"": parent / name})
    else:
        mounts = _controller_mounts()
        cgroup = Cgroup(name, {c: mounts[c] / PARENT / name for c in V1_CONTROLLERS})
    made: list[Path] = []
    try:
        for path in cgroup.paths:
            _make_below_parent(path)
            made.append(path)
    except OSError:
        for path in made:  # and nothing of a cgroup that was there before
            path.rmdir()
        raise
    return cgroup


def remove_parent() -> None:
    """Remove `drums` itself from every hierarchy where it is empty; left alone where another host uses it."""
    roots = [_V2_ROOT] if host_version() == 2 else list(_controller_mounts().values())
    for root in dict.fromkeys(roots):
        try:
            os.rmdir(root / PARENT)
        except OSError:
            continue


def existing_cgroup(name: str) -> Cgroup | None:
    """The cgroup `drums/NAME` if any of its directories is there."""
    if host_version() == 2:
        cgroup = Cgroup(name, {"": _V2_ROOT / PARENT / name})
    else:
        mounts = _controller_mounts()
        cgroup = Cgroup(name, {c: mounts[c] / PARENT / name for c in V1_CONTROLLERS})
    present = {c: path for c, path in cgroup.directories.items() if path.is_dir()}
    return Cgroup(name, present) if present else None


def cgroup_names() -> list[str]:
    """The names below `drums`, in any hierarchy."""
    roots = [_V2_ROOT] if host_version() == 2 else list(_controller_mounts().values())
    found: set[str] = set()
    for root in dict.fromkeys(roots):
        if (root / PARENT).is_dir():
            found.update(p.name for p in (root / PARENT).iterdir() if p.is_dir())
    return sorted(found)
