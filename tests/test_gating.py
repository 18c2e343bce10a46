"""Gates fail closed: whatever a gate does wrong is a failed result with the reason, and costs no other gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from drums.errors import DumpError
from drums_core.abc import DesktopView
from drums_core.gating import GateSet
from drums_core.model import (
    Cause,
    DesktopEvent,
    Finding,
    GateResult,
    Json,
    Limits,
    Phase,
    PluginId,
    Quarantined,
    Status,
    failed,
    passed,
)
from drums_core.plugins import Registry
from drums_core.verdict import SPECIFIED_GATES

VIEW = DesktopView(
    slot="s",
    pid1=1,
    root=Path("/nowhere"),
    home="home/user",
    cgroup=None,  # type: ignore[arg-type] # no gate here looks
    limits=Limits(),
    namespaces={},
    others={},
    init_argv=(),
    restored=(),
    guest=None,  # type: ignore[arg-type] # no gate here asks
    ready_limit_s=30.0,
)
EVENT = Quarantined("planted")


async def nothing(*_: object) -> Any:
    return None


async def well(*_: object) -> Any:
    return passed()


@attrs.define
class PlantedGate:
    """A gate that does what it is told."""

    checking: Callable[..., Awaitable[Any]] = well
    recording: Callable[..., Awaitable[Any]] = nothing
    phase: Phase = Phase.PRE_RESUME
    records: bool = False

    async def record(self, view: DesktopView) -> Json:
        return await self.recording(view)

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        return await self.checking(view, evidence)  # type: ignore[no-any-return]


@attrs.define
class PlantedEventGate:
    """An event gate that does what it is told."""

    judging: Callable[[DesktopEvent], Any]
    phase: Phase = Phase.EVENT

    def judge(self, event: DesktopEvent) -> Finding | None:
        return self.judging(event)  # type: ignore[no-any-return]


def gate_set(timeout_s: float = 5.0, **gates: PlantedGate | PlantedEventGate) -> GateSet:
    registry = Registry()
    for name, gate in gates.items():
        registry.gates[name] = (lambda gate=gate: gate, PluginId(name, f"drums-{name}", "3.1"))  # type: ignore[misc]
    return GateSet.build(registry, timeout_s=timeout_s)


async def check_all(gates: GateSet, evidence: dict[str, Json] | None = None) -> dict[str, GateResult]:
    return {r.gate: r for r in await gates.check(Phase.PRE_RESUME, VIEW, evidence or {})}


def raises(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def work(*_: object) -> Any:
        await trio.lowlevel.checkpoint()
        raise error

    return work


def answers(value: object) -> Callable[..., Awaitable[Any]]:
    async def work(*_: object) -> Any:
        return value

    return work


async def hangs(*_: object) -> Any:
    await trio.sleep_forever()


async def crowd(*_: object) -> Any:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(raises(ValueError("one")))
        nursery.start_soon(raises(OSError("two")))


BAD = {
    "raises": (raises(RuntimeError("planted")), "the gate itself failed: RuntimeError: planted"),
    "raises at once": (lambda *_: 1 / 0, "the gate itself failed: ZeroDivisionError"),
    "raises a group": (crowd, "the gate itself failed: ExceptionGroup"),
    "stops": (raises(StopAsyncIteration()), "the gate itself failed: "),
    "asserts": (raises(AssertionError("wrong")), "the gate itself failed: AssertionError: wrong"),
    "is not async": (lambda *_: passed(), "the gate itself failed: TypeError"),
    "hangs": (hangs, "the gate gave no result within 5 s"),
    "answers None": (answers(None), "the gate returned NoneType instead of a Finding"),
    "answers True": (answers(True), "the gate returned bool instead of a Finding"),
    "answers text": (answers("pass"), "the gate returned str instead of a Finding"),
}


@pytest.mark.parametrize(("what", "reason"), BAD.values(), ids=BAD)
async def test_a_bad_gate_fails_alone(
    autojump_clock: trio.testing.MockClock, what: Callable[..., Any], reason: str
) -> None:
    """Its result is a failure with the reason, the infrastructure's; gates before and after it have their own."""
    gates = gate_set(before=PlantedGate(), bad=PlantedGate(what), after=PlantedGate())
    found = await check_all(gates)
    assert list(found) == ["before", "bad", "after"]
    assert found["bad"].status is Status.FAIL and found["bad"].cause is Cause.INFRASTRUCTURE
    assert reason in found["bad"].reason
    assert found["before"].status is found["after"].status is Status.PASS
    assert found["before"].reason == "" and found["before"].cause is None


@pytest.mark.parametrize("ok", [None, 1, "yes", [1], 0, ""])
async def test_only_true_passes(ok: object) -> None:
    """A finding whose `ok` is merely truthy is a failure: what a gate meant by it is not guessed."""
    gates = gate_set(bad=PlantedGate(answers(Finding(ok))))  # type: ignore[arg-type]
    assert (await check_all(gates))["bad"].status is Status.FAIL


@pytest.mark.parametrize("cause", ["nonsense", None, 7])
async def test_a_cause_that_is_none(cause: object) -> None:
    """A failed finding with a cause that is not one of the three costs no other gate either."""
    bad = Finding(False, "planted", cause=cause)  # type: ignore[arg-type]
    found = await check_all(gate_set(bad=PlantedGate(answers(bad)), good=PlantedGate()))
    assert found["bad"].status is Status.FAIL and found["bad"].cause is Cause.INFRASTRUCTURE
    assert found["good"].status is Status.PASS


async def test_a_failed_finding_is_kept_whole() -> None:
    """Reason, cause, observed and expected arrive in the result, with the gate's plugin and its time."""
    bad = failed("off by one", observed=2, expected=1, cause=Cause.TASK)
    result = (await check_all(gate_set(bad=PlantedGate(answers(bad)))))["bad"]
    assert (result.reason, result.observed, result.expected, result.cause) == ("off by one", 2, 1, Cause.TASK)
    assert result.plugin == PluginId("bad", "drums-bad", "3.1")
    assert result.phase is Phase.PRE_RESUME and result.duration_ms >= 0


async def test_missing_evidence_fails_without_asking_the_gate() -> None:
    """A gate that records fails when the checkpoint lacks its evidence; evidence that is None was recorded."""
    asked: list[object] = []

    async def check(_: object, evidence: object) -> Finding:
        asked.append(evidence)
        return passed()

    gates = gate_set(recorder=PlantedGate(check, records=True), other=PlantedGate(check))
    found = await check_all(gates, {"stranger": 1})
    assert found["recorder"].status is Status.FAIL
    assert "no evidence of gate 'recorder'" in found["recorder"].reason
    assert found["other"].status is Status.PASS and asked == [None]
    assert (await check_all(gates, {"recorder": None}))["recorder"].status is Status.PASS
    assert (await check_all(gates, {"recorder": [1]}))["recorder"].status is Status.PASS and [1] in asked


async def test_gates_of_one_phase_run_one_after_another(autojump_clock: trio.testing.MockClock) -> None:
    """None shares its time with another, and one that hangs stops none; a gate of another phase is not run."""
    running: list[int] = []

    async def slow(*_: object) -> Finding:
        assert not running
        running.append(1)
        await trio.sleep(4)
        running.clear()
        return passed()

    start = trio.current_time()
    gates = gate_set(a=PlantedGate(slow), b=PlantedGate(hangs), c=PlantedGate(slow), d=PlantedGate(phase=Phase.SETTLED))
    results = await check_all(gates)
    assert [(name, x.status) for name, x in results.items()] == [
        ("a", Status.PASS),
        ("b", Status.FAIL),
        ("c", Status.PASS),
    ]
    assert trio.current_time() - start == 4 + 5 + 4


async def test_ready_gates_have_the_ready_limit_on_top(autojump_clock: trio.testing.MockClock) -> None:
    """The gate that waits for the guest server is not cut off by the limit of a single gate."""
    gates = gate_set(ready=PlantedGate(hangs, phase=Phase.READY))
    start = trio.current_time()
    [result] = await gates.check(Phase.READY, VIEW, {})
    assert "within 35 s" in result.reason and trio.current_time() - start == 35


async def test_cancellation_passes_through(autojump_clock: trio.testing.MockClock) -> None:
    """A cancelled check is no failed gate."""
    with trio.move_on_after(1) as scope:
        await check_all(gate_set(bad=PlantedGate(hangs)))
    assert scope.cancelled_caught


RECORDING = {
    "raises": (raises(OSError("planted")), "gate 'bad' could not record its evidence: OSError: planted"),
    "raises a group": (crowd, "gate 'bad' could not record its evidence: ExceptionGroup"),
    "hangs": (hangs, "gate 'bad' could not record its evidence: TooSlowError"),
}


@pytest.mark.parametrize(("what", "message"), RECORDING.values(), ids=RECORDING)
async def test_a_gate_that_cannot_record_fails_the_dump(
    autojump_clock: trio.testing.MockClock, what: Callable[..., Awaitable[Any]], message: str
) -> None:
    """A checkpoint without its evidence is none: a DumpError that names the gate, even where several fail."""
    bad = PlantedGate(recording=what, records=True)
    with pytest.raises(DumpError) as caught:
        await gate_set(good=PlantedGate(recording=answers(1), records=True), bad=bad).record(VIEW)
    assert message in caught.value.message
    with pytest.raises(DumpError):
        await gate_set(bad=bad, worse=attrs.evolve(bad)).record(VIEW)


async def test_evidence_is_recorded_where_a_gate_records() -> None:
    """By gate; None is evidence; a gate that records nothing, and an event gate, are not asked."""
    gates = gate_set(
        one=PlantedGate(recording=answers({"a": 1}), records=True),
        none=PlantedGate(recording=nothing, records=True),
        silent=PlantedGate(recording=raises(AssertionError())),
        event=PlantedEventGate(lambda _: None),
    )
    assert await gates.record(VIEW) == {"one": {"a": 1}, "none": None}


def test_events() -> None:
    """An event gate adds failures only; one that raises has failed, and costs no other."""

    def broken(_: DesktopEvent) -> Finding:
        raise RuntimeError("planted")

    gates = gate_set(
        silent=PlantedEventGate(lambda _: None),
        content=PlantedEventGate(lambda _: passed()),
        broken=PlantedEventGate(broken),
        judging=PlantedEventGate(lambda event: failed(event.reason, cause=Cause.AGENT)),  # type: ignore[union-attr]
        checked=PlantedGate(raises(AssertionError("not for events"))),
    )
    results = {r.gate: r for r in gates.judge_event(EVENT)}
    assert set(results) == {"broken", "judging"}
    assert all(r.status is Status.FAIL and r.phase is Phase.EVENT for r in results.values())
    assert "the gate itself failed: RuntimeError: planted" in results["broken"].reason
    assert (results["judging"].reason, results["judging"].cause) == ("planted", Cause.AGENT)
    assert results["judging"].plugin == PluginId("judging", "drums-judging", "3.1")


@pytest.mark.parametrize("answer", [False, True, "fail", 0, Finding(1)])  # type: ignore[arg-type]
def test_nonsense_of_an_event_gate(answer: object) -> None:
    """What is neither a finding nor None is a failure of the gate."""
    gates = gate_set(bad=PlantedEventGate(lambda _: answer), good=PlantedEventGate(lambda _: failed("seen")))
    results = {r.gate: r for r in gates.judge_event(EVENT)}
    assert set(results) == {"bad", "good"}
    assert results["bad"].status is Status.FAIL


def test_event_gates_are_not_asked_in_a_check() -> None:
    """Not even when one claims a checked phase; required are the specification's and the operator's."""
    gates = gate_set(odd=PlantedEventGate(lambda _: None, phase=Phase.PRE_RESUME))
    assert trio.run(check_all, gates) == {}
    registry = Registry()
    for name in (*SPECIFIED_GATES, "extra", "other"):
        registry.gates[name] = (PlantedGate, PluginId(name, "d", "1"))
    made = GateSet.build(registry, timeout_s=1, extra_required=["extra"])
    assert set(made.required) == {*SPECIFIED_GATES, "extra"}
    assert {p.name for p in made.plugin_ids()} == {*SPECIFIED_GATES, "extra", "other"}
