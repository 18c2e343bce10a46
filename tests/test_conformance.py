"""The conformance suites: the built-ins pass them, and each rule sees a plugin that breaks it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel
from requires import requires
from test_gates_unit import Desktop, FakeGuest

from drums.errors import CheckerError, GuestError
from drums_core.abc import DesktopView, EventGate
from drums_core.model import (
    Finding,
    Json,
    Limits,
    OutOfMemory,
    Phase,
    ProcessDied,
    Quarantined,
    failed,
    passed,
)
from drums_core.plugins import Plugins, build_manager
from drums_core.sys.helper import run_helper
from drums_core.testing import (
    Check,
    Conformance,
    EndState,
    FakeDesktop,
    FakeStepContext,
    RecordingSystem,
    check_event_gate,
    check_gate,
    check_gate_shape,
    check_verifier,
    recording_system,
    require,
)
from drums_core.testing.end_state import file
from drums_verifiers.trial import score_state

pytest_plugins = ["drums_core.testing.pytest_plugin"]
REGISTRY = build_manager().registry
GATES = {name: factory for name, (factory, _) in REGISTRY.gates.items()}
EVENT = {name for name, factory in GATES.items() if isinstance(factory(), EventGate)}


def broken(checks: list[Check]) -> set[str]:
    return {c.rule for c in checks if not c.ok}


# --- gates


@pytest.mark.parametrize("name", sorted(GATES))
def test_shapes_of_the_built_in_gates(name: str) -> None:
    """All thirteen."""
    require(check_gate_shape(GATES[name]))


FAULTY: dict[str, Callable[[Desktop], DesktopView]] = {
    "alive_after_resume": lambda d: d.changed(restored=()),
    "cgroup": lambda d: d.changed(limits=Limits(cpus=0.7)),
    "guest_ready": lambda d: d.changed(guest=FakeGuest(GuestError("silent")), ready_limit_s=0.1),
    "init_identity": lambda d: d.changed(init_argv=("another",)),
    "isolation": lambda d: d.changed(others={"b": d.view.namespaces}),
    "lock_applied": lambda d: d.changed(namespaces={**d.view.namespaces, "pid": 1}),
    "lock_pre_resume": lambda d: d.changed(namespaces={**d.view.namespaces, "pid": 1}),
    "mount_table": lambda d: d.changed(pid1=os.getpid()),
    "netns": lambda d: d.changed(pid1=os.getpid()),
    "state_hash": lambda d: d.changed(home="other"),
}


@requires("root")
def test_the_built_in_gates_on_a_desktop(tmp_path: Path) -> None:
    """Each that looks at a desktop, on the stand-in of the gates' own tests, with a fault of its own."""
    assert set(FAULTY) == set(GATES) - EVENT
    (tmp_path / "home").mkdir()
    (tmp_path / "other").mkdir()
    desktop = Desktop(tmp_path / "home")
    found: dict[str, list[Check]] = {}

    async def all_of_them() -> None:
        for name, plant in FAULTY.items():
            gate = GATES[name]()
            assert not isinstance(gate, EventGate)
            found[name] = await check_gate(gate, desktop.view, faulty={"planted": plant(desktop)})

    try:
        trio.run(all_of_them)
    finally:
        desktop.close()
    require([c for checks in found.values() for c in checks])
    assert all(len(checks) >= 6 for checks in found.values())


def died(signal: int) -> ProcessDied:
    return ProcessDied(1, 1, "x", signal, 0, False, False)


EVENTS: dict[str, tuple[list[Any], list[Any]]] = {
    "no_app_crash": ([died(11), died(6)], [died(15), died(0), Quarantined("x"), OutOfMemory(1, False)]),
    "no_oom_kill": ([OutOfMemory(1, True)], [died(11), Quarantined("x")]),
    "not_quarantined": ([Quarantined("x", by_user=False)], [died(11), OutOfMemory(1, False)]),
}


@pytest.mark.parametrize("name", sorted(EVENT))
def test_the_built_in_event_gates(name: str) -> None:
    """Each for events that break it and events that do not."""
    gate = GATES[name]()
    assert isinstance(gate, EventGate)
    breaking, harmless = EVENTS[name]
    require(check_event_gate(gate, breaking=breaking, harmless=harmless))


class GoodGate:
    """Compares the limits with those recorded."""

    phase = Phase.PRE_RESUME
    records = True

    async def record(self, view: DesktopView) -> Json:
        await trio.lowlevel.checkpoint()
        return {"pids": view.limits.pids}

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        await trio.lowlevel.checkpoint()
        now = {"pids": view.limits.pids}
        return passed() if now == evidence else failed("the limit changed", observed=now, expected=evidence)


class Counting(GoodGate):
    async def record(self, view: DesktopView) -> Json:
        self.count = getattr(self, "count", 0) + 1
        return self.count


class Tuples(GoodGate):
    async def record(self, view: DesktopView) -> Json:
        return (1, 2)


class NoJson(GoodGate):
    async def record(self, view: DesktopView) -> Json:
        return {1, 2}


class Blind(GoodGate):
    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        return passed()


class Always(GoodGate):
    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        return failed("no")


class Bare(GoodGate):
    async def check(self, view: DesktopView, evidence: Json) -> Any:
        return view.limits.pids == evidence["pids"]


class Changes(GoodGate):
    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        found = await super().check(view, dict(evidence))
        evidence["seen"] = True
        return found


class Wordless(GoodGate):
    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        found = await super().check(view, evidence)
        return attrs.evolve(found, reason="")


class Remembers(GoodGate):
    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        self.view = view
        await trio.lowlevel.checkpoint()
        return await super().check(self.view, evidence)


class Spoilt(GoodGate):
    spoilt = False

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        if self.spoilt:
            raise RuntimeError("still busy")
        self.spoilt = True
        found = await super().check(view, evidence)
        self.spoilt = False
        return found


BAD_GATES: list[tuple[type[GoodGate], str]] = [
    (Counting, "its evidence is JSON, and the same twice"),
    (Tuples, "its evidence is JSON, and the same twice"),
    (NoJson, "its evidence is JSON, and the same twice"),
    (Blind, "it fails: planted"),
    (Always, "a desktop that is as recorded passes"),
    (Bare, "a desktop that is as recorded passes"),
    (Changes, "evidence is not changed"),
    (Wordless, "it fails: planted"),
    (Remembers, "it serves several desktops at once"),
    (Spoilt, "it can be cancelled at any point, and used again"),
]
VIEW: Any = DesktopView("d", 1, Path("/"), "home", None, Limits(), {}, {}, (), (), None, 1.0)  # type: ignore[arg-type]
OTHER = attrs.evolve(VIEW, limits=Limits(pids=7))


def test_a_good_gate_passes() -> None:
    """Every rule."""
    require(check_gate_shape(GoodGate))
    require(trio.run(lambda: check_gate(GoodGate(), VIEW, faulty={"planted": OTHER})))


@pytest.mark.parametrize(("gate", "rule"), BAD_GATES, ids=lambda x: getattr(x, "__name__", None))
def test_a_bad_gate_is_seen(gate: type[GoodGate], rule: str) -> None:
    """By the rule about it."""
    checks = trio.run(lambda: check_gate(gate(), VIEW, faulty={"planted": OTHER}))
    assert rule in broken(checks)
    with pytest.raises(Conformance, match=rule):
        require(checks)


def test_a_gate_without_a_planted_fault_is_not_tried() -> None:
    """Nor one of events without an event, nor a suite without a rule."""
    assert "a fault is planted" in broken(trio.run(lambda: check_gate(GoodGate(), VIEW, faulty={})))
    quarantine = GATES["not_quarantined"]()
    assert isinstance(quarantine, EventGate)
    assert broken(check_event_gate(quarantine, breaking=[], harmless=[]))
    assert broken(check_event_gate(quarantine, breaking=[died(11)], harmless=[Quarantined("x")]))
    with pytest.raises(Conformance):
        require([])


def test_shapes_that_are_wrong() -> None:
    """A phase that is none, a method that is not async, a constructor that reads a file."""

    class Sync(GoodGate):
        def check(self, view: DesktopView, evidence: Json) -> Any: ...

    def phaseless() -> GoodGate:
        gate = GoodGate()
        vars(gate)["phase"] = "later"
        return gate

    class Reads(GoodGate):
        def __init__(self) -> None:
            Path("/etc/hostname").read_text()

    assert broken(check_gate_shape(Sync)) == {"its methods are what they must be"}
    assert broken(check_gate_shape(phaseless)) == {"its phase fits what it is"}
    assert broken(check_gate_shape(Reads)) == {"it is made without opening a file"}


# --- verifiers


def states(**changes: Any) -> list[EndState]:
    """The four cases of a function that looks for `~/a` with the text `x`."""
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        ("solution", 1.0, {"a": file("x")}),
        ("untouched", 0.0, {}),
        ("wrong", 0.0, {"a": file("y")}),
    ]
    found = [EndState(case, "f", expect, files=files) for case, expect, files in cases]
    return [*found, EndState("damaged", "f", "error", files={"a": file("x")}, unanswered=["read_file"], **changes)]


def good(desktop: Any, task: Any) -> float:
    try:
        return float(desktop.read_file("a") == b"x")
    except FileNotFoundError:
        return 0.0


def swallows(desktop: Any, task: Any) -> float:
    try:
        return good(desktop, task)
    except BaseException:  # noqa: BLE001 - the fault
        return 0.0


def generous(desktop: Any, task: Any) -> float:
    return float(desktop.exists("a") and bool(desktop.read_file("a")))


def strict(desktop: Any, task: Any) -> float:
    return float(desktop.read_file("a") == b"x")


def random(desktop: Any, task: Any, seen: list[int] = []) -> float:  # noqa: B006 - the fault
    seen.append(1)
    return good(desktop, task) if len(seen) % 2 else 0.5


def asks_nothing(desktop: Any, task: Any) -> float:
    return 1.0


def asks_more(desktop: Any, task: Any) -> float:
    return float(good(desktop, task) and desktop.execute("id").returncode == 0)


def too_much(desktop: Any, task: Any) -> float:
    return 7 * good(desktop, task)


VERIFIERS: list[tuple[Callable[..., Any], str]] = [
    (swallows, "f, damaged: it scores error"),
    (generous, "f, wrong: it scores 0.0"),
    (strict, "f, untouched: it scores 0.0"),
    (random, "f, solution: it scores 1.0"),
    (asks_nothing, "f, untouched: no answer is no score"),
    (asks_more, "f, solution: it scores 1.0"),
    (too_much, "f, solution: it scores 1.0"),
]


def test_a_good_verifier_passes() -> None:
    """Every rule."""
    require(check_verifier(lambda state: score_state(good, state), states()))


@pytest.mark.parametrize(("function", "rule"), VERIFIERS, ids=lambda x: getattr(x, "__name__", None))
def test_a_bad_verifier_is_seen(function: Callable[..., Any], rule: str) -> None:
    """By the rule about it."""
    assert rule in broken(check_verifier(lambda state: score_state(function, state), states()))


def test_states_that_prove_nothing() -> None:
    """A missing case, and one that expects what its case does not mean."""
    score = lambda state: score_state(good, state)  # noqa: E731 - a name for what all lines take
    assert broken(check_verifier(score, states()[:3])) == {"f: there is a state of each case"}
    easy = [attrs.evolve(s, expect=1.0, files={"a": file("x")}) for s in states() if s.case == "wrong"]
    assert "f, wrong: it expects what its case means" in broken(check_verifier(score, [*states(), *easy]))


def test_scoring_a_state() -> None:
    """As a host does it: FAIL is a 0 unasked, options are given, an async function is awaited."""

    async def later(desktop: Any, task: Any, *, part: float) -> Any:
        assert task["evaluator"]["options"] == {"part": part}
        return part

    state = EndState("solution", "f", 1.0, options={"part": 0.5})
    assert score_state(later, state) == 0.5
    assert score_state(later, attrs.evolve(state, last_action="FAIL")) == 0.0
    with pytest.raises(CheckerError, match="raised TypeError"):
        score_state(later, attrs.evolve(state, options={}))


# --- the kit


def test_the_kit_needs_no_pytest() -> None:
    """Its import brings none."""
    code = (
        "import sys; from drums_core.testing import *; import drums_verifiers.trial; assert 'pytest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_fixtures(
    fake_desktop: Callable[[EndState], FakeDesktop],
    step_context: FakeStepContext,
    fresh_manager: Callable[..., Plugins],
    recording_system: RecordingSystem,
) -> None:
    """Of the pytest plugin."""
    assert fake_desktop(states()[0]).read_text("a") == "x"
    trio.run(step_context.upload, "a", b"x")
    assert step_context.uploaded == {"a": b"x"}
    plugins = fresh_manager(one=object())
    assert [r.name for r in plugins.records] == ["one"] and plugins.registry.gates == {}
    assert recording_system.plans == []


def test_plans_are_recorded() -> None:
    """And not carried out; a failure is told as the real helper's would be."""
    target = Path("/tmp/drums-recording-system")
    with recording_system() as recorder:
        assert trio.run(run_helper, [["mkdir", str(target), 0o755, 0, 0]]) == (0, b"")
        assert recorder.operations("mkdir") == [["mkdir", str(target), 0o755, 0, 0]] and not target.exists()
        recorder.fail("drums-enter: mount: [Errno 28] No space left on device")
        with pytest.raises(OSError, match="No space left"):
            trio.run(run_helper, [["mount"]])
    assert len(recorder.plans) == 2
