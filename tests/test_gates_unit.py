"""Each gate on a small nested desktop of plain processes, and planted faults for each way in which it can fail."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel
import trio.testing
from requires import requires

from drums.errors import GuestError
from drums_core.abc import DesktopView
from drums_core.evidence.processes import namespace_inodes, processes_in_pidns, read_processes, read_stat
from drums_core.model import (
    Cause,
    Finding,
    Json,
    Limits,
    OutOfMemory,
    Phase,
    ProcessDied,
    ProcessIdentity,
    Quarantined,
    WatchLost,
)
from drums_core.sys.inside import in_namespace
from drums_gates._report import bounded, some
from drums_gates.alive_after_resume import AliveAfterResumeGate
from drums_gates.cgroup import CgroupGate
from drums_gates.guest_ready import GuestReadyGate
from drums_gates.init_identity import InitIdentityGate
from drums_gates.isolation import IsolationGate
from drums_gates.lock_applied import LockAppliedGate
from drums_gates.lock_pre_resume import LockPreResumeGate
from drums_gates.mount_table import MountTableGate
from drums_gates.netns import NetnsGate
from drums_gates.no_app_crash import NoAppCrashGate
from drums_gates.no_oom_kill import NoOomKillGate
from drums_gates.not_quarantined import NotQuarantinedGate
from drums_gates.state_hash import StateHashGate

# A desktop's stand-in: pid 1 of its namespaces, and an application that holds locks and does as it is told.
APPLICATION = """
import fcntl, os, sys
home = sys.argv[1]
f = os.open(home + "/lock", os.O_RDWR | os.O_CREAT); os.ftruncate(f, 4096)
fcntl.lockf(f, fcntl.LOCK_EX, 100, 0)
g = os.open(home + "/flock", os.O_RDWR | os.O_CREAT); fcntl.flock(g, fcntl.LOCK_EX)
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
INIT = """
import os, sys
if os.fork(): os.waitpid(-1, 0); import signal; signal.pause()
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""
HELPER = """
import os, sys
child = os.fork()
if child:
    os.waitpid(child, 0); sys.exit()
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
DIRECTORY = Path("/sys/fs/cgroup/fake")


@attrs.define
class FakeCgroup:
    """A cgroup of the processes of a pid namespace, with faults to plant."""

    inode: int
    limits: Limits
    strangers: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    paths: list[Path] = attrs.field(factory=lambda: [DIRECTORY])

    def members(self) -> Mapping[Path, frozenset[int]]:
        return {DIRECTORY: frozenset(processes_in_pidns(self.inode)) - self.lost | self.strangers}

    def read_limits(self) -> Limits:
        return self.limits

    def oom_kills(self) -> int:
        return 0


class FakeGuest:
    """A guest server that answers as told, question by question, then well."""

    def __init__(self, *answers: Callable[[], Awaitable[None]] | BaseException) -> None:
        self.answers = list(answers)

    async def health(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.answers:
            answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            await answer()


class Desktop:
    """The stand-in, and its view."""

    def __init__(self, home: Path) -> None:
        kinds = ("--user", "--map-root-user", "--pid", "--mount", "--net", "--ipc", "--uts")
        argv = ["unshare", *kinds, sys.executable, "-c", HELPER, INIT, str(home), APPLICATION]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout and self.process.stdout.readline() == "ready\n"
        self.init = next(
            pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if parent_of(pid) == self.process.pid
        )
        namespaces = namespace_inodes(self.init)
        limits = Limits(cpus=0.3)
        self.view = DesktopView(
            slot="a",
            pid1=self.init,
            root=home.parent,
            home=home.name,
            cgroup=FakeCgroup(namespaces["pid"], limits),
            limits=limits,
            namespaces=namespaces,
            others={"b": {k: v + 1_000_000 for k, v in namespaces.items()}},
            init_argv=(sys.executable, "-c", INIT, str(home), APPLICATION),
            restored=tuple(read_processes(processes_in_pidns(namespaces["pid"]))),
            guest=FakeGuest(),
            ready_limit_s=2.0,
        )
        self.application = next(x for x in self.view.restored if x.host_pid != self.init)

    def do(self, code: str) -> None:
        """Let the application run a line of code."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(code + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def changed(self, **fields: Any) -> DesktopView:
        return attrs.evolve(self.view, **fields)

    def close(self) -> None:
        os.kill(self.init, 9)
        self.process.communicate()


def parent_of(pid: int) -> int:
    try:
        return read_stat(pid).parent
    except (FileNotFoundError, ProcessLookupError):
        return 0


@pytest.fixture
def desktop(tmp_path: Path) -> Iterator[Desktop]:
    """A running stand-in."""
    home = tmp_path / "home"
    home.mkdir()
    made = Desktop(home)
    yield made
    made.close()


async def recorded(gate: Any, view: DesktopView) -> Any:
    """A gate's evidence as it comes back from a checkpoint."""
    return json.loads(json.dumps(await gate.record(view)))


def fails(finding: Finding | None, *words: str) -> Finding:
    """Assert that a finding is a failure whose one-line reason holds these words."""
    assert finding is not None and not finding.ok
    assert "\n" not in finding.reason
    for word in words:
        assert word in finding.reason, finding.reason
    json.dumps([finding.observed, finding.expected])
    return finding


RECORDING = [
    LockAppliedGate,
    LockPreResumeGate,
    InitIdentityGate,
    MountTableGate,
    NetnsGate,
    StateHashGate,
    IsolationGate,
    AliveAfterResumeGate,
]


@requires("root")
@pytest.mark.parametrize("make", [*RECORDING, CgroupGate, GuestReadyGate])
async def test_an_unchanged_desktop_passes(desktop: Desktop, make: Callable[[], Any]) -> None:
    """What was recorded of a desktop holds for the same desktop."""
    gate = make()
    evidence = await recorded(gate, desktop.view)
    assert (evidence is not None) is gate.records
    finding = await gate.check(desktop.view, evidence)
    assert finding.ok, finding


@requires("root")
@pytest.mark.parametrize("make", RECORDING)
@pytest.mark.parametrize("evidence", [None, {}, [], "x", {"locks": 3}, {"mounts": []}, {"entries": {}, "count": 0}])
async def test_missing_or_odd_evidence_fails(desktop: Desktop, make: Callable[[], Any], evidence: Any) -> None:
    """Without usable evidence a gate that records fails; it never passes."""
    fails(await make().check(desktop.view, evidence), "no usable evidence")


@requires("root")
@pytest.mark.parametrize("make", [LockAppliedGate, LockPreResumeGate])
async def test_locks(desktop: Desktop, make: Callable[[], Any]) -> None:
    """A lock lost, one more, and one of another range fail, with the lock named."""
    gate = make()
    evidence = await recorded(gate, desktop.view)
    assert len(evidence["locks"]) == 2
    desktop.do("fcntl.lockf(f, fcntl.LOCK_UN)")
    fails(await gate.check(desktop.view, evidence), "1 missing", "POSIX WRITE 0..99", "/home/lock")
    desktop.do("fcntl.lockf(f, fcntl.LOCK_EX, 101, 0)")
    fails(await gate.check(desktop.view, evidence), "1 missing", "did not hold: POSIX WRITE 0..100")
    desktop.do("fcntl.lockf(f, fcntl.LOCK_UN); fcntl.lockf(f, fcntl.LOCK_EX, 100, 0)")
    assert (await gate.check(desktop.view, evidence)).ok


@requires("root")
async def test_cgroup(desktop: Desktop) -> None:
    """A stranger, a process outside, another limit, and no cgroup fail."""
    gate = CgroupGate()
    inode, limits = desktop.view.namespaces["pid"], desktop.view.limits

    async def check(**faults: Any) -> Finding:
        return await gate.check(desktop.changed(cgroup=attrs.evolve(FakeCgroup(inode, limits), **faults)), None)

    assert (await check()).ok
    assert (await check(limits=attrs.evolve(limits, cpus=0.300001))).ok
    fails(await check(strangers=frozenset({os.getpid()})), "1 strangers", str(os.getpid()))
    fails(await check(lost=frozenset({desktop.init})), "1 processes of the desktop are not in", str(desktop.init))
    fails(await check(paths=[]), "no cgroup")
    fails(await check(paths=[DIRECTORY, Path("/gone")]), "'/gone' could not be read")
    wrong: tuple[tuple[str, Any], ...] = (("cpus", 2.0), ("memory_bytes", 1 << 62), ("swap_bytes", 4096), ("pids", 7))
    for name, value in wrong:
        fails(await check(limits=attrs.evolve(limits, **{name: value})), name, str(value))
    fails(
        await gate.check(desktop.changed(namespaces={**desktop.view.namespaces, "pid": 1}), None), "not a live process"
    )


@requires("root")
async def test_init_identity(desktop: Desktop) -> None:
    """Another pid 1, another command line, another program, no namespace of its own fail."""
    gate = InitIdentityGate()
    evidence = await recorded(gate, desktop.view)
    application = desktop.application.host_pid
    fails(await gate.check(desktop.changed(pid1=application), evidence), "expected exactly one")
    fails(await gate.check(desktop.changed(init_argv=("tini",)), evidence), "command line", "tini")
    fails(await gate.check(desktop.view, {**evidence, "executable": "/sbin/tini"}), "executable", "/sbin/tini")
    fails(await gate.check(desktop.view, {**evidence, "argv": ["x"]}), "argv")
    own = os.getpid()
    fails(await gate.check(desktop.changed(pid1=own), evidence), "pid namespace")
    fails(await gate.check(desktop.changed(pid1=own, namespaces=namespace_inodes("self")), evidence), "host's")


@requires("root")
async def test_mount_table(desktop: Desktop) -> None:
    """A mount more, less or with other options fails."""
    gate = MountTableGate()
    evidence = await recorded(gate, desktop.view)
    desktop.do("import subprocess; subprocess.run(['mount', '-t', 'tmpfs', 'x', home], check=True)")
    fails(await gate.check(desktop.view, evidence), "mount table", "is extra")
    desktop.do("subprocess.run(['umount', home], check=True)")
    assert (await gate.check(desktop.view, evidence)).ok
    desktop.do("subprocess.run(['mount', '-o', 'remount,bind,ro', '/dev/shm'], check=True)")
    fails(await gate.check(desktop.view, evidence), "/dev/shm", "options")


@requires("root")
async def test_netns(desktop: Desktop) -> None:
    """Another address, the host's namespace and a shared one fail."""
    gate = NetnsGate()
    evidence = await recorded(gate, desktop.view)
    own = namespace_inodes("self")
    view, net = desktop.view, desktop.view.namespaces["net"]
    fails(await gate.check(desktop.changed(others={"b": {"net": net}}), evidence), "shares", "'b'")
    fails(await gate.check(desktop.changed(pid1=os.getpid()), evidence), "expected")
    fails(await gate.check(desktop.changed(pid1=os.getpid(), namespaces=own), evidence), "the host's")

    def change() -> None:
        from pyroute2 import IPRoute

        with IPRoute() as netlink:
            netlink.link("set", index=1, state="up")
            netlink.addr("add", index=1, address="10.9.0.1", prefixlen=24)

    fd = os.open(f"/proc/{view.pid1}/ns/net", os.O_RDONLY)
    await trio.to_thread.run_sync(in_namespace, fd, "net", change)
    os.close(fd)
    fails(await gate.check(view, evidence), "the network differs", "addresses")


@requires("root")
async def test_state_hash(desktop: Desktop) -> None:
    """A changed byte fails, with the path; so does a home that is a link."""
    gate = StateHashGate()
    evidence = await recorded(gate, desktop.view)
    (desktop.view.root / "home" / "flock").write_text("x")
    fails(await gate.check(desktop.view, evidence), "home directory", "'flock'", "hash")
    (desktop.view.root / "way").symlink_to("home")
    with pytest.raises(OSError):
        await gate.check(desktop.changed(home="way"), evidence)


@requires("root")
async def test_isolation(desktop: Desktop) -> None:
    """A namespace shared with the host or another desktop fails, and one that is new, in any process of the desktop."""
    gate = IsolationGate()
    view = desktop.view
    evidence = await recorded(gate, view)
    assert evidence == {"apart": {}}
    for kind in ("pid", "mnt", "net", "ipc", "uts", "user"):
        others = {"b": view.others["b"], "c": {**view.others["b"], kind: view.namespaces[kind]}}
        fails(await gate.check(desktop.changed(others=others), evidence), f"the {kind} namespace of desktop 'c'")
        fails(await gate.check(desktop.changed(namespaces={**view.namespaces, kind: 1}), evidence), kind, "expected 1")
    assert (await gate.check(desktop.changed(others={}), evidence)).ok
    fails(await gate.check(desktop.changed(others={"c": {}}), evidence), "not known")
    own = namespace_inodes("self")
    fails(await gate.check(desktop.changed(pid1=os.getpid(), namespaces=own), evidence), "of the host")
    desktop.do("import ctypes; assert ctypes.CDLL(None).unshare(0x04000000) == 0")  # a new UTS namespace
    host_pid, inside = desktop.application.host_pid, desktop.application.inner_pid
    fails(await gate.check(view, evidence), f"process {inside} inside is in another uts namespace")
    assert (await gate.check(view, await recorded(gate, view))).ok  # it had one when it was dumped, too
    others = {"c": {**view.others["b"], "uts": namespace_inodes(host_pid)["uts"]}}
    fails(await gate.check(desktop.changed(others=others), evidence), f"process {host_pid} shares the uts", "'c'")
    stray = attrs.evolve(FakeCgroup(view.namespaces["pid"], view.limits), strangers=frozenset({os.getpid()}))
    fails(await gate.check(desktop.changed(cgroup=stray), evidence), str(os.getpid()), "the host")


@requires("root")
async def test_alive_after_resume(desktop: Desktop) -> None:
    """A process that was not restored, one that ended, and a pid that went to another process fail."""
    gate = AliveAfterResumeGate()
    view = desktop.view
    evidence = await recorded(gate, view)
    assert [x[0] for x in evidence["processes"]] == [1, desktop.application.inner_pid]
    nothing: list[Json] = [[], {}]
    for damaged in (*nothing, {**evidence, "processes": []}, {**evidence, "event_sources": None}):
        fails(await gate.check(view, damaged), "no usable evidence")
    timer: list[Json] = ["timerfd", 1, 3, "clock 1, interval (1, 0), to fire"]
    watched = {**evidence, "event_sources": [timer]}
    fails(await gate.check(view, watched), "1 timers or connections", "timerfd 3 of pid 1")
    stopped = [*timer[:3], "clock 1, interval (1, 0), at rest"]
    fails(await gate.check(desktop.changed(event_sources=(stopped,)), watched), "to fire")
    assert (await gate.check(desktop.changed(event_sources=(timer,)), watched)).ok
    assert (await gate.check(desktop.changed(event_sources=(timer,)), evidence)).ok
    fails(await gate.check(desktop.changed(restored=view.restored[:1]), evidence), "1 of 2 processes were not restored")
    fails(await gate.check(desktop.changed(restored=()), evidence), "not restored")
    renamed = (view.restored[0], attrs.evolve(view.restored[1], command="other"))
    fails(await gate.check(desktop.changed(restored=renamed), evidence), "not restored")
    reused = (view.restored[0], attrs.evolve(view.restored[1], start_ticks=1))
    fails(await gate.check(desktop.changed(restored=reused), evidence), "no longer run")
    extra = (*view.restored, ProcessIdentity(inner_pid=99, command="x", host_pid=999_999_999, start_ticks=1))
    fails(await gate.check(desktop.changed(restored=extra), evidence), "'x' (pid 99)")
    os.kill(desktop.application.host_pid, 9)
    while read_processes([desktop.application.host_pid]):
        os.sched_yield()
    fails(await gate.check(view, evidence), "1 of 2 restored processes", f"(pid {desktop.application.inner_pid})")


def fake_view(guest: FakeGuest, limit_s: float) -> DesktopView:
    """A view for gates that look at the guest server only."""
    limits = Limits()
    return DesktopView(
        slot="a",
        pid1=0,
        root=Path("/nowhere"),
        home="",
        cgroup=FakeCgroup(0, limits),
        limits=limits,
        namespaces={},
        others={},
        init_argv=(),
        restored=(),
        guest=guest,
        ready_limit_s=limit_s,
    )


async def test_guest_ready(autojump_clock: trio.testing.MockClock) -> None:
    """It asks again until an answer; with none in time the last error is in the reason; a hang ends in time too."""
    gate = GuestReadyGate()
    error = GuestError("connection refused")
    slow = FakeGuest(error, error, ConnectionResetError("reset"), trio.lowlevel.checkpoint)
    assert (await gate.check(fake_view(slow, 5), None)).ok
    start = trio.current_time()
    fails(await gate.check(fake_view(FakeGuest(error), 5), None), "within 5 s", "GuestError: connection refused")
    fails(await gate.check(fake_view(FakeGuest(trio.sleep_forever), 5), None), "1 questions", "no answer")
    assert trio.current_time() - start == pytest.approx(10)
    with pytest.raises(ZeroDivisionError):
        await gate.check(fake_view(FakeGuest(ZeroDivisionError()), 5), None)


def died(signal: int, *, after_action: bool = False) -> ProcessDied:
    return ProcessDied(
        host_pid=4711,
        inner_pid=12,
        command="gedit",
        signal=signal,
        exit_code=0,
        core_dumped=False,
        after_action=after_action,
    )


EVENTS = [died(11), died(15), died(0), OutOfMemory(1, False), Quarantined("broken page"), WatchLost("ENOBUFS")]


@pytest.mark.parametrize(
    ("gate", "breaking"),
    [(NoAppCrashGate(), {0, 5}), (NoOomKillGate(), {3, 5}), (NotQuarantinedGate(), {4})],
)
def test_events_break_their_gates_only(gate: Any, breaking: set[int]) -> None:
    """Each event gate fails on its own events, and on a gap in watching where it needed the watching."""
    assert gate.phase is Phase.EVENT
    assert {i for i, event in enumerate(EVENTS) if gate.judge(event) is not None} == breaking
    for i in breaking:
        fails(gate.judge(EVENTS[i]))


@pytest.mark.parametrize(
    ("signal", "name"), [(11, "SIGSEGV"), (4, "SIGILL"), (6, "SIGABRT"), (7, "SIGBUS"), (8, "SIGFPE")]
)
def test_crashes_name_pid_command_and_signal(signal: int, name: str) -> None:
    """A crash finding says which process died of what."""
    fails(NoAppCrashGate().judge(died(signal)), "'gedit'", "pid 12", name)


@pytest.mark.parametrize("signal", [0, 1, 2, 9, 13, 15, 24, 64])
def test_other_ends_are_no_crashes(signal: int) -> None:
    """An exit, a kill, and real-time signals are no crash."""
    assert NoAppCrashGate().judge(died(signal)) is None


def test_causes() -> None:
    """What the agent can bring about is the agent's once it has acted; a quarantine never is."""
    crash, memory, quarantine = NoAppCrashGate(), NoOomKillGate(), NotQuarantinedGate()
    assert fails(crash.judge(died(5, after_action=True))).cause is Cause.AGENT
    assert fails(crash.judge(died(31))).cause is Cause.INFRASTRUCTURE
    assert fails(memory.judge(OutOfMemory(2, True)), "2 kills").cause is Cause.AGENT
    assert fails(memory.judge(OutOfMemory(2, False))).cause is Cause.INFRASTRUCTURE
    for gate in (crash, memory):
        assert fails(gate.judge(WatchLost("gap")), "gap").cause is Cause.INFRASTRUCTURE
        assert fails(gate.judge(WatchLost("gap", by_agent=True)), "gap").cause is Cause.AGENT
    for by_user in (True, False):
        finding = fails(quarantine.judge(Quarantined("broken page", by_user=by_user)), "broken page")
        assert finding.cause is Cause.INFRASTRUCTURE


def test_each_entry_point_registers_the_gate_of_its_name() -> None:
    """Every gate of pyproject's entry points is a plugin that registers one factory, under the entry point's name."""
    document = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    entries = document["project"]["entry-points"]["drums.gates"]
    assert len(entries) == 13
    for name, module in entries.items():
        registered: dict[str, Any] = {}
        importlib.import_module(module).drums_register_gates(register=registered.__setitem__)
        assert list(registered) == [name]
        gate = registered[name]()
        if gate.phase is Phase.EVENT:
            assert callable(gate.judge)
        else:
            assert isinstance(gate.records, bool) and callable(gate.record) and callable(gate.check)


def test_details_are_bounded() -> None:
    """A thousand differences make a short reason and a short list."""
    many = [f"{i}" + "x" * 1000 for i in range(1000)]
    assert len(some(many)) < 700 and some(many).endswith("and 997 more")
    assert len(bounded(many)) == 20 and bounded(many)[-1] == "... and 981 more"
