"""`drums gates`: what it lists; that the self-test can fail, takes custom gates, and leaves nothing when ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner
from desktops import Witness
from requires import requires

from drums.errors import ConfigError
from drums_core import hookimpl, load_config
from drums_core.abc import CheckContext
from drums_core.commands.gates import gates
from drums_core.model import Finding, Json, Phase, failed, passed
from drums_core.plugins import Plugins, build_manager
from drums_core.selftest.checker import SelftestChecker
from drums_core.selftest.run import Findings, all_faults, choose, selftest
from drums_core.testing.faults import FAULTS, Fault, Point
from drums_core.verdict import EVENT_GATES, SPECIFIED_GATES

STARTED_WITHIN_S = 120.0


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(gates, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_list() -> None:
    """Every gate with its phase, package and number of faults, in the order of the phases."""
    rows = json.loads(invoke("ls", "--json").output)["gates"]
    assert {row["gate"] for row in rows} >= {*SPECIFIED_GATES, *EVENT_GATES}
    orders = [list(Phase).index(Phase(row["phase"])) for row in rows]
    assert orders == sorted(orders)
    for row in rows:
        if row["gate"] in (*SPECIFIED_GATES, *EVENT_GATES):
            assert row["faults"] == sum(row["gate"] in x.gates for x in FAULTS.values()) >= 4
            assert row["required"] is (row["gate"] in SPECIFIED_GATES)
            assert row["package"].startswith("drums ")
    assert "state_hash" in invoke("ls").output


def test_gates_are_chosen_by_name() -> None:
    """Of one gate its faults and no harmless act; of none everything; a gate that is not there is refused."""
    known = [*SPECIFIED_GATES, *EVENT_GATES, "silent"]
    assert choose(FAULTS, [], known) == list(FAULTS.values())
    chosen = choose(FAULTS, ["netns", "isolation"], known)
    assert chosen and all({"netns", "isolation"} & set(x.gates) for x in chosen)
    with pytest.raises(ConfigError, match="no gate 'netnss'"):
        choose(FAULTS, ["netnss"], known)
    with pytest.raises(ConfigError, match="'silent' brings no fault"):
        choose(FAULTS, ["silent"], known)


# --- gates that are wrong


@attrs.define
class PlantedGate:
    """A gate that says what it is told to, restore after restore."""

    says: Callable[[int], Finding]
    phase: Phase = Phase.PRE_RESUME
    records: bool = False
    asked: int = 0

    async def record(self, view: object) -> Json:
        return {}

    async def check(self, view: object, evidence: Json) -> Finding:
        self.asked += 1
        return self.says(self.asked)


def with_gate(name: str, gate: PlantedGate, *, faults: Sequence[Fault] = ()) -> Callable[[SelftestChecker], Plugins]:
    """What is installed, with one gate in another's place, or added."""

    class Plugin:
        @hookimpl
        def drums_register_faults(self, register: Any) -> None:
            if faults:
                register(name, lambda: faults)

    def plugins(checker: SelftestChecker) -> Plugins:
        found = build_manager([("drums_selftest", checker), ("planted", Plugin())])
        owner = found.registry.gates.get(name, next(iter(found.registry.gates.values())))[1]
        found.registry.gates[name] = (lambda: gate, owner)
        return found

    return plugins


FAULT = Fault("custom", ("custom",), Point.PRE_RESUME, "planted", "make", Path(__file__).with_name("planted_fault.py"))
ABSENT = attrs.evolve(FAULT, action="cannot")


class Failing(SelftestChecker):
    """A checker that never gives a score."""

    async def check(self, context: CheckContext) -> float:
        raise RuntimeError("planted")


def unscored(_: SelftestChecker) -> Plugins:
    """What is installed, with a checker that fails and a gate whose fault this host cannot make."""
    return with_gate("custom", PlantedGate(lambda _: passed()), faults=[ABSENT])(Failing())


async def run(plugins: Callable[[SelftestChecker], Plugins], *names: str, clean: int = 0) -> Findings:
    return await selftest(load_config(), gates=names, clean=clean, plugins=plugins)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Findings]:
    """Self-tests side by side: with a blind gate, one that raises an alarm now and then, one that brings a fault."""
    found: dict[str, Findings] = {}

    async def one(name: str, work: Callable[[], Any]) -> None:
        found[name] = await work()

    async def main() -> None:
        blind = with_gate("init_identity", PlantedGate(lambda _: passed()))
        flaky = with_gate("flaky", PlantedGate(lambda n: passed() if n % 3 else failed("a bad day")))
        seeing = with_gate("custom", PlantedGate(lambda _: failed("seen")), faults=[FAULT])
        broken = with_gate("custom", PlantedGate(lambda _: passed()), faults=[attrs.evolve(FAULT, action="absent")])
        absent = with_gate("custom", PlantedGate(lambda _: passed()), faults=[ABSENT])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "blind", lambda: run(blind, "init_identity"))
            nursery.start_soon(one, "flaky", lambda: run(flaky, "guest_ready", clean=6))
            nursery.start_soon(one, "custom", lambda: run(seeing, "custom"))
            nursery.start_soon(one, "broken", lambda: run(broken, "custom"))
            nursery.start_soon(one, "absent", lambda: run(absent, "custom"))
            nursery.start_soon(one, "unscored", lambda: run(unscored, "custom", clean=3))

    trio.run(main)
    return found


@requires("root", "criu")
def test_a_blind_gate_is_found_out(outcomes: dict[str, Findings]) -> None:
    """Every fault of the gate is a miss, by name."""
    found = outcomes["blind"]
    document = found.document()
    names = {x.name for x in FAULTS.values() if "init_identity" in x.gates}
    assert not found.good and document["planted"] == len(names) and document["caught"] == 0
    assert {x["fault"] for x in document["missed"]} == names
    assert all("init_identity did not fail" in x["why"] for x in document["missed"])


@requires("root", "criu")
def test_a_gate_that_flaps_is_found_out(outcomes: dict[str, Findings]) -> None:
    """In trials of other gates' faults, and in clean restores."""
    found = outcomes["flaky"]
    assert not found.good and not found.missed
    alarms = found.document()["alarms"]
    assert any("flaky: a bad day" in x.get("gates", []) for x in alarms)
    assert any("flaky: a bad day" in x.get("reasons", []) for x in alarms)
    assert found.false_alarms == len(alarms) >= 3


@requires("root", "criu")
def test_a_clean_desktop_that_is_not_scored_is_an_alarm(outcomes: dict[str, Findings]) -> None:
    """Its episode is valid all the same."""
    found = outcomes["unscored"]
    alarms = found.document()["alarms"]
    assert found.document()["clean_verified"] == len(alarms) > 0
    for alarm in alarms:
        assert alarm["verdict"] == "valid" and alarm["reasons"] == ["it was not scored: RuntimeError: planted"]


@requires("root", "criu")
def test_a_custom_gate_brings_its_faults(outcomes: dict[str, Findings]) -> None:
    """They are planted by its own file; one that cannot be made is a miss, one that the host lacks is told and none."""
    assert outcomes["custom"].good
    [trial] = outcomes["custom"].trials
    assert trial.fault.name == "custom" and trial.failing == {"custom"}
    assert outcomes["broken"].document()["missed"][0]["fault"] == "custom"
    assert "no attribute 'absent'" in outcomes["broken"].document()["missed"][0]["why"][0]
    absent = outcomes["absent"]
    assert absent.good and "there is no such thing here" in absent.document()["skipped"]["custom"]


def test_faults_of_plugins_have_names_of_their_own() -> None:
    """One that takes a name of the matrix is refused."""
    plugins = with_gate("x", PlantedGate(lambda _: passed()), faults=[attrs.evolve(FAULT, name="netns")])
    with pytest.raises(ConfigError, match=r"'netns'.*the name is taken"):
        all_faults(plugins(SelftestChecker()))


# --- the command


@requires("root", "criu")
def test_the_command_says_what_it_found() -> None:
    """One JSON object, and exit code 0."""
    command = [sys.executable, "-m", "drums", "gates", "selftest", "init_identity", "--clean", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["planted"] == document["caught"] == 5
    assert (document["missed"], document["clean"], document["false_alarms"]) == ([], 3, 0)
    assert "gates: 100%" in done.stderr


def test_the_command_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 for a miss, in words."""
    from drums_core.commands import gates as module
    from drums_core.selftest.trial import Trial

    async def planted(*_: object, **__: object) -> Findings:
        return Findings([Trial(FAULT, verdict="valid", lines={"custom": {"status": "pass", "reason": ""}})])

    monkeypatch.setattr(module, "selftest", planted)
    result = invoke("selftest")
    assert result.exit_code == 1
    assert "missed: custom (planted): custom did not fail" in result.output
    assert "1 faults planted, 0 caught, 1 missed" in result.output
    assert json.loads(CliRunner().invoke(gates, ["selftest", "--json"]).stdout)["missed"]


@requires("root", "criu")
def test_ending_it_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle: no process, mount, cgroup or folder of its desktops."""
    config = load_config()
    command = [sys.executable, str(Path(__file__).with_name("selftest_watched.py")), str(tmp_path / "seen")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "a desktop is up\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=STARTED_WITHIN_S)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    assert process.returncode != 0 and "KeyboardInterrupt" in said
    witness = Witness()
    witness.names = set((tmp_path / "seen").read_text().split())
    assert witness.names
    assert witness.left_over(config.state_dir) == []
