"""A desktop's cgroup: for real on this host's version, and version 2 against recorded files."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import pytest
from requires import requires

from drums_core.leftovers import clear_worker_cgroups, worker_cgroup_name
from drums_core.model import KernelLimits, Limits
from drums_core.sys import cgroups
from drums_core.sys.cgroups import Cgroup

COUNTER = "import time, sys\nwhile True:\n    sys.stdout.write('x'); sys.stdout.flush(); time.sleep(0.002)\n"
PATIENCE_S = 10.0
Start = Callable[..., "subprocess.Popen[bytes]"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def group() -> Iterator[Cgroup]:
    made = cgroups.create_cgroup(f"test-{secrets.token_hex(4)}")
    yield made
    deadline = time.monotonic() + PATIENCE_S
    while not made.remove():
        with contextlib.suppress(FileNotFoundError):
            made.kill()
            made.thaw()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    cgroups.remove_parent()


@pytest.fixture
def start(group: Cgroup) -> Iterator[Start]:
    """Start a program in the cgroup."""
    running: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        running.append(process)
        for path in group.paths:
            (path / "cgroup.procs").write_text(str(process.pid))
        return process

    yield run
    for process in running:
        process.kill()
        for path in group.paths:
            if path.is_dir() and process.poll() is None and process.pid in group.pids():
                group.thaw()
        process.communicate()


@requires("root")
@pytest.mark.parametrize("cpus", [0.01, 0.29, 0.3, 0.57, 1.0, 1.15, 2.3, 3.99])
def test_limits_read_back(group: Cgroup, cpus: float) -> None:
    """As they were written, CPU time to the microsecond whatever the float; the kernel refuses none of these."""
    limits = Limits(cpus=cpus, memory_bytes=64 << 20, swap_bytes=4096, pids=7)
    group.write_limits(limits)
    read = group.read_limits()
    assert read.cpus == pytest.approx(cpus, abs=1e-9)
    assert attrs.astuple(read)[1:] == attrs.astuple(limits)[1:]


@requires("root")
def test_limits_change_either_way(group: Cgroup) -> None:
    """Raised and lowered again and again: the kernel demands an order of the writes, another each way."""
    for size in (64 << 20, 512 << 20, 4096 << 10, 1 << 40, 64 << 20):
        for swap in (0, 1 << 30, 0):
            limits = Limits(memory_bytes=size, swap_bytes=swap)
            group.write_limits(limits)
            assert attrs.asdict(group.read_limits()) == attrs.asdict(limits)


@requires("root")
def test_no_limit_reads_as_none(group: Cgroup) -> None:
    """A fresh cgroup has none; without `cpu` that one stays so."""
    assert group.read_limits() == KernelLimits(None, None, None, None)
    group.write_limits(Limits(), cpu=False)
    assert group.read_limits().cpus is None and group.read_limits().pids == Limits().pids


@requires("root")
def test_members(group: Cgroup, start: Start) -> None:
    """Every directory lists the process and its children; a zombie is no member; an empty one has none."""
    assert group.pids() == frozenset() and set(group.members()) == set(group.paths)
    process = start(
        "import os, sys\npid = os.fork()\nif not pid: os._exit(0)\nprint('x', flush=True); sys.stdin.read()"
    )
    assert process.stdout and process.stdout.read(1)
    wait_until(lambda: group.pids() == {process.pid})  # its child is a zombie by now
    assert all(members == {process.pid} for members in group.members().values())


@requires("root")
def test_freeze_and_thaw(group: Cgroup, start: Start) -> None:
    """Frozen, a process does nothing; thawed, it goes on. Both may be asked for twice."""
    process = start(COUNTER)
    assert process.stdout and process.stdout.read(1)
    group.freeze()
    group.freeze()
    os.set_blocking(process.stdout.fileno(), False)
    while process.stdout.read():  # what it wrote before
        pass
    time.sleep(0.05)
    assert not process.stdout.read()
    group.thaw()
    group.thaw()
    wait_until(lambda: bool(process.stdout and process.stdout.read()))


@requires("root")
def test_a_part_stays_frozen(group: Cgroup, start: Start) -> None:
    """What is set apart neither runs nor is lost when the rest is thawed, and goes with it when it is killed."""
    rest, part = start(COUNTER), start(COUNTER)
    for process in (rest, part):
        assert process.stdout and process.stdout.read(1)
        os.set_blocking(process.stdout.fileno(), False)

    def drained(process: subprocess.Popen[bytes]) -> bool:
        assert process.stdout
        return not process.stdout.read()

    assert not group.apart.exists
    group.freeze()
    group.set_apart([part.pid])
    wait_until(lambda: drained(rest) and drained(part))
    group.thaw()
    wait_until(lambda: not drained(rest))
    assert drained(part) and group.pids() == {rest.pid, part.pid} and group.apart.pids() == {part.pid}
    group.apart.thaw()
    wait_until(lambda: not drained(part))
    group.apart.freeze()
    group.freeze()
    assert not group.remove()
    group.kill()
    group.thaw()
    assert rest.wait(PATIENCE_S) == part.wait(PATIENCE_S) == -9
    wait_until(group.remove)
    assert not group.apart.exists


@requires("root")
def test_evict(group: Cgroup, start: Start) -> None:
    """One process leaves for the parent, and is not frozen with the others."""
    one, two = start("input()"), start("input()")
    group.evict(one.pid)
    assert group.pids() == {two.pid}
    for path in group.paths:
        assert str(one.pid) in (path.parent / "cgroup.procs").read_text().split()
    group.freeze()  # CRIU leaves before the freeze; what is left in it is frozen alone
    one.communicate(b"\n")
    group.thaw()


@requires("root")
def test_kill_and_remove(group: Cgroup, start: Start) -> None:
    """It cannot be removed while it has a process; frozen ones die when thawed; then it is gone, and gone twice."""
    process = start("import os\nos.fork()\ninput()")
    wait_until(lambda: len(group.pids()) == 2)
    group.freeze()
    assert not group.remove()
    group.kill()
    group.thaw()
    assert process.wait(PATIENCE_S) == -9
    wait_until(lambda: not group.pids())
    wait_until(group.remove)
    assert not any(path.exists() for path in group.paths)
    assert group.remove()
    assert cgroups.existing_cgroup(group.name) is None


@requires("root")
def test_found_again(group: Cgroup) -> None:
    """By its name, even where one directory is gone; a second of the name is refused and the first left whole."""
    assert cgroups.existing_cgroup(group.name) == group
    assert group.name in cgroups.cgroup_names()
    with pytest.raises(FileExistsError):
        cgroups.create_cgroup(group.name)
    if len(group.paths) > 1:
        group.paths[0].rmdir()
        found = cgroups.existing_cgroup(group.name)
        assert found is not None and set(found.paths) == set(group.paths[1:])


@requires("root")
def test_oom_kills_are_counted(group: Cgroup, start: Start) -> None:
    """The kernel's counter, from zero."""
    assert group.oom_kills() == 0
    group.write_limits(Limits(memory_bytes=32 << 20, swap_bytes=0))
    process = start("input()\nx = bytearray(256 << 20)\nprint(len(x))")
    process.communicate(b"\n")
    assert process.returncode == -9
    assert group.oom_kills() >= 1


@requires("root")
def test_a_refused_limit_is_named(group: Cgroup) -> None:
    """The error holds the value and the file, and the kernel's errno."""
    with pytest.raises(OSError, match=r"writing -5 to .*pids\.max") as caught:
        cgroups._write(group._file("pids", "pids.max"), -5)
    assert caught.value.errno == 22


# Version 2, against files as a kernel 6.12 shows them.

V2 = {
    "cgroup.procs": "",
    "cgroup.events": "populated 1\nfrozen 0\n",
    "cgroup.freeze": "0\n",
    "cgroup.kill": "",
    "cpu.max": "max 100000\n",
    "memory.max": "max\n",
    "memory.swap.max": "max\n",
    "memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n",
    "pids.max": "max\n",
}


@pytest.fixture
def v2(tmp_path: Path) -> Cgroup:
    return recorded(tmp_path / "drums" / "d", V2)


def recorded(folder: Path, files: Mapping[str, str]) -> Cgroup:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder.parent / "cgroup.procs").write_text("")
    return Cgroup(folder.name, {"": folder})


def test_v2_limits(v2: Cgroup) -> None:
    """Read: `max` is none. Written: each file as cgroup-v2.rst has it, `max` where CPU time stays unlimited."""
    [folder] = v2.paths
    assert v2.is_v2 and v2.read_limits() == KernelLimits(None, None, None, None)
    v2.write_limits(Limits(0.29, 64 << 20, 8192, 99))
    files = {name: (folder / name).read_text() for name in ("cpu.max", "memory.max", "memory.swap.max", "pids.max")}
    # A file of the disk keeps its old tail, which a cgroup file does not: what was written comes first.
    assert files["cpu.max"].startswith("29000 100000")
    assert files["memory.max"] == "67108864" and files["memory.swap.max"] == "8192"
    (folder / "cpu.max").write_text("29000 100000\n")
    (folder / "pids.max").write_text("99\n")
    assert attrs.astuple(v2.read_limits()) == (0.29, 64 << 20, 8192, 99)
    v2.write_limits(Limits(), cpu=False)
    assert (folder / "cpu.max").read_text().startswith("max 100000")


def test_v2_oom_kills(v2: Cgroup) -> None:
    """`oom_kill` of memory.events, not its neighbours; a kernel without the line is an error, never a zero."""
    assert v2.oom_kills() == 2
    (v2.paths[0] / "memory.events").write_text("low 0\noom 3\n")
    with pytest.raises(OSError, match="oom_kill"):
        v2.oom_kills()


def test_v2_freeze(v2: Cgroup) -> None:
    """It asks, and waits for the kernel's word in cgroup.events; a kernel that does not say so in time is an error."""
    [folder] = v2.paths
    with pytest.raises(TimeoutError, match="'d' is not frozen after"):
        v2.freeze(timeout_s=0.01)
    assert (folder / "cgroup.freeze").read_text().strip() == "1"
    (folder / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    v2.freeze(timeout_s=0.01)
    with pytest.raises(TimeoutError, match="'d' is not thawed after"):
        v2.thaw(timeout_s=0.01)
    (folder / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    v2.thaw(timeout_s=0.01)
    assert (folder / "cgroup.freeze").read_text().strip() == "0"


def test_v2_members_kill_and_evict(v2: Cgroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One directory; kill is the kernel's own; a process is evicted to the caller's cgroup; a dead pid is no member."""
    [folder] = v2.paths
    (folder / "cgroup.procs").write_text(f"{os.getpid()}\n4194303\n")
    assert v2.members() == {folder: {os.getpid()}}
    v2.kill()
    assert (folder / "cgroup.kill").read_text() == "1"
    own = tmp_path / "own"
    own.mkdir()
    (own / "cgroup.procs").write_text("")
    monkeypatch.setattr(cgroups, "_V2_ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "_own_v2_cgroup", lambda: "own")
    v2.evict(4242)
    assert (own / "cgroup.procs").read_text() == "4242"
    assert (folder.parent / "cgroup.procs").read_text() == ""


def test_v2_is_made_with_its_controllers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cpu, memory and pids are on version 2: they are handed down to `drums`, then its cgroup is made."""
    monkeypatch.setattr(cgroups, "_V2_ROOT", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    (tmp_path / cgroups.PARENT).mkdir()
    (tmp_path / cgroups.PARENT / "cgroup.subtree_control").write_text("")
    assert cgroups.host_version() == 2
    made = cgroups.create_cgroup("d")
    assert made == Cgroup("d", {"": tmp_path / "drums" / "d"}) == cgroups.existing_cgroup("d")
    assert cgroups.cgroup_names() == ["d"]
    for folder in (tmp_path, tmp_path / "drums"):
        assert (folder / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert made.remove() and cgroups.existing_cgroup("d") is None


def test_a_host_with_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controllers that are missing are named; a version 2 without memory does not count as one."""
    monkeypatch.setattr(cgroups, "_V2_ROOT", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    monkeypatch.setattr(cgroups, "_controller_mounts", lambda: {"cpu": tmp_path, "pids": tmp_path})
    with pytest.raises(OSError, match="no cgroup controller freezer, memory on this host"):
        cgroups.host_version()


@requires("root")
def test_only_the_cgroups_of_checks_whose_host_ended_are_cleared() -> None:
    """All hosts of a machine share the cgroup tree, and may have state folders of their own."""
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    mine = cgroups.create_cgroup(worker_cgroup_name())
    parts = worker_cgroup_name().split("-")
    theirs = cgroups.create_cgroup("-".join([parts[0], str(ended.pid), parts[2], parts[3]]))
    try:
        clear_worker_cgroups()
        assert all(path.is_dir() for path in mine.paths)
        assert not any(path.is_dir() for path in theirs.paths)
    finally:
        for made in (mine, theirs):
            assert made.remove()
        cgroups.remove_parent()
