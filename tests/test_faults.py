"""The fault matrix: each gate sees real faults, names them, leaves the other gates alone, and sees none elsewhere.

The faults are made by processes of their own, in the kernel or on disk (`drums_core.testing.faults`), and tried by the
engine of `drums gates selftest`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import pytest
import trio
from desktops import Witness
from requires import requires

import drums_core.testing
from drums_core import load_config
from drums_core.selftest.run import Findings, selftest
from drums_core.selftest.trial import Trial
from drums_core.testing.faults import FAULTS, By, Fault, Need, Point, fault
from drums_core.verdict import EVENT_GATES, SPECIFIED_GATES

AT_ONCE = 16
CLEAN = 12
TESTING = Path(drums_core.testing.__file__).parent


@attrs.frozen
class Tried:
    """What the self-test found, and what it left on the host."""

    findings: Findings
    trials: Mapping[str, Trial]
    left: list[str]


@pytest.fixture(scope="module")
def tried() -> Iterator[Tried]:
    witness = Witness()
    config = load_config()
    findings = trio.run(lambda: selftest(config, clean=CLEAN, at_once=AT_ONCE, also=witness))
    trials = {x.fault.name: x for x in findings.trials}
    yield Tried(findings, trials, witness.left_over(config.state_dir))


@requires("root", "criu")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_gates_alone(tried: Tried, name: str) -> None:
    """Each of them fails with the cause and the words, the others pass; an act that is no fault fails none."""
    trial = tried.trials[name]
    if trial.skipped:
        pytest.skip(trial.problem)
    assert trial.misses() == [] and trial.false_alarms() == [], trial.document()
    assert trial.unsaid() == [], trial.lines[trial.fault.gates[0]]["reason"]
    assert trial.failing == set(trial.fault.gates)
    passing = {gate for gate, line in trial.lines.items() if line["status"] == "pass"}
    assert passing >= set(SPECIFIED_GATES) - set(trial.fault.gates)
    for gate in trial.fault.gates:
        assert trial.lines[gate]["cause"] == trial.fault.cause
        assert any(reason.startswith(f"{gate}: ") for reason in trial.reasons)


@requires("root", "criu")
def test_a_fault_while_verified_is_in_the_reward(tried: Tried) -> None:
    """The score is there, and the reward is not valid."""
    verified = [x for x in tried.trials.values() if x.fault.point is Point.VERIFY]
    assert {gate for x in verified for gate in x.fault.gates} == set(EVENT_GATES)
    for trial in verified:
        assert trial.reward is not None and not trial.reward.valid
        assert set(trial.reward.bad_gates) == set(trial.fault.gates)
        assert trial.reward.score == (None if trial.fault.by is By.USER else 1.0)


@requires("root", "criu")
def test_the_desktops_beside_are_not_touched(tried: Tried) -> None:
    """Those that a fault mixed up with its own: valid, but for the one whose memory was filled."""
    beside = {name: trial for name, trial in tried.trials.items() if name not in FAULTS}
    assert set(beside) == {"harmless:beside", "beside:no_oom_kill"}
    for trial in beside.values():
        assert trial.misses() == [] and trial.false_alarms() == [], trial.document()


@requires("root", "criu")
def test_what_is_reported(tried: Tried) -> None:
    """The numbers of `drums gates selftest --json`."""
    document = tried.findings.document()
    assert document["planted"] == document["caught"] >= 70
    assert document["missed"] == document["alarms"] == [] and document["false_alarms"] == 0
    assert document["clean"] == CLEAN == sum(document["clean_by_origin"].values())
    assert document["clean_verified"] >= CLEAN // 4
    assert set(document["clean_by_origin"]) == {"create", "reset", "fork", "fork of a staged desktop"}
    assert tried.findings.good


@requires("root", "criu")
def test_nothing_is_left(tried: Tried) -> None:
    assert tried.left == []


def test_each_gate_has_a_fault() -> None:
    """One that has its very name, too."""
    assert {*SPECIFIED_GATES, *EVENT_GATES} == {gate for x in FAULTS.values() for gate in x.gates}
    assert {*SPECIFIED_GATES, *EVENT_GATES} <= set(FAULTS)
    with pytest.raises(LookupError, match="no fault 'x'"):
        fault("x")


def test_faults_know_no_gate() -> None:
    """What makes a fault imports the standard library and `drums_core.sys`; what names it, nothing that judges."""
    for path in sorted(x for x in TESTING.rglob("*.py") if x.parent.name in ("plant", "faults")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.startswith(("drums_core.testing", "drums_core.sys", "drums_core.services"))
                foreign = name.split(".")[0] not in sys.stdlib_module_names
                planting = path.parent.name == "plant"
                assert own or not foreign or (not planting and name in ("attrs", "trio")), f"{path}: {name}"
                assert not (planting and name == "drums_core.services")


def trial(**of: object) -> Trial:
    """A trial of a fault of gate `a`, with another gate `b`."""
    lines = {
        name: {"gate": name, "status": status, "reason": "planted"} for name, status in of.items() if len(name) == 1
    }
    facts: dict[str, object] = {"verdict": "invalid", "causes": ["infrastructure"], "required": ("a", "b")}
    facts |= {name: value for name, value in of.items() if len(name) > 1}
    return Trial(Fault("a", ("a",), Point.READY, "", ""), lines=lines, **facts)  # type: ignore[arg-type]


def test_what_a_miss_is() -> None:
    """The engine itself can fail: a gate that passed, a verdict, a cause, a reward, a fault that was not made."""
    assert trial(a="fail", b="pass").misses() == []
    assert trial(a="pass", b="pass", verdict="valid").misses() == [
        "a did not fail",
        "the verdict is valid, expected invalid",
    ]
    assert trial(a="fail", b="pass", verdict="pending").misses() == ["the verdict is pending, expected invalid"]
    assert trial(a="fail", b="pass", causes=["agent"]).misses() == ["the causes are ['agent'], expected infrastructure"]
    assert trial(a="fail", problem="no such process").misses() == ["not tried: no such process"]
    assert trial(problem="no nftables", skipped=True).misses() == []
    assert not Findings([trial(a="pass", b="pass")]).good
    assert Findings([trial(a="fail", b="pass")]).good


def test_what_a_false_alarm_is() -> None:
    """A gate that failed beside the fault's own, and one without a result."""
    assert trial(a="fail", b="pass").false_alarms() == []
    assert trial(a="fail", b="fail").false_alarms() == ["b: planted"]
    assert trial(a="fail", b="pending").false_alarms() == trial(a="fail").false_alarms() == ["b gave no result"]
    assert not Findings([trial(a="fail", b="fail")]).good
    findings = Findings()
    findings.clean.alarms.append({"origin": "fork", "verdict": "invalid", "reasons": ["b: planted"]})
    assert not findings.good and findings.document()["false_alarms"] == 1


def test_needs_are_met_by_some_host() -> None:
    """Each need is some fault's, and a copy of the stage is made beside no other desktop."""
    assert {need for x in FAULTS.values() for need in x.needs} == set(Need)
    assert not [x.name for x in FAULTS.values() if {Need.STAGE, Need.OTHER} <= x.needs]
    assert not [x.name for x in FAULTS.values() if {Need.STAGE, Need.TIGHT} <= x.needs]
