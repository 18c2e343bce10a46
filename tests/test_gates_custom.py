"""Gates of others that misbehave: a required one that cannot load stops the daemon; others cost their episode only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from desktops import Outcome, Witness, judged, make_task
from requires import requires

from drums_core import build_manager, hookimpl, load_config, open_host
from drums_core.abc import DesktopView
from drums_core.host import Host
from drums_core.model import DesktopEvent, Finding, Json, Phase, Quarantined, failed, passed
from drums_core.slot import Slot
from drums_core.verdict import SPECIFIED_GATES

GATE_TIMEOUT_S = 3.0
REQUIRED = ("hostile", "hostile_event", "late")
BROKEN = "raise RuntimeError('planted at import')\n"


@pytest.fixture
def broken_gate(tmp_path: Path) -> dict[str, str]:
    """The environment of a program that has a package with a gate that cannot be imported, as pip would leave it."""
    info = tmp_path / "site" / "drums_gate_broken-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "drums_gate_broken.py").write_text(BROKEN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drums-gate-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drums.gates]\nbroken = drums_gate_broken\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site")}


@requires("root")
@pytest.mark.parametrize("name", ["broken", "absent"])
def test_a_required_gate_that_cannot_load_stops_the_daemon(
    tmp_path: Path, broken_gate: dict[str, str], name: str
) -> None:
    """With its name and the reason; not even the state folder is touched."""
    config = tmp_path / "drums.toml"
    config.write_text(f'extra_required_gates = ["{name}"]\nstate_dir = "{tmp_path}/state"\n')
    environment = {k: v for k, v in broken_gate.items() if k != "DRUMS_STATE_DIR"}
    command = [sys.executable, "-m", "drums", "serve", "--port", "0", "--config", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and f"'{name}'" in done.stderr
    reason = "RuntimeError: planted at import" if name == "broken" else "no installed package registers it"
    assert reason in done.stderr
    assert not list((tmp_path / "state").glob("run/*"))


@attrs.define
class HostileGate:
    """Misbehaves as the slot's name in `how` says."""

    how: dict[str, str]
    phase: Phase = Phase.PRE_RESUME
    records: bool = False

    async def record(self, view: DesktopView) -> Json:
        return None

    async def check(self, view: DesktopView, evidence: Json) -> Any:
        match self.how.get(view.slot):
            case "raises":
                raise RuntimeError("planted")
            case "hangs":
                await trio.sleep_forever()
            case "fails":
                return failed("planted", observed=object())  # not even JSON
            case "lies":
                return True
        return passed()


@attrs.define
class LateGate:
    """Looks just before the checker, and fails where `how` says so."""

    how: dict[str, str]
    phase: Phase = Phase.VERIFY
    records: bool = False

    async def record(self, view: DesktopView) -> Json:
        return None

    async def check(self, view: DesktopView, evidence: Json) -> Any:
        return failed("planted late") if self.how.get(view.slot) == "late" else passed()


@attrs.define
class HostileEventGate:
    """Raises at a quarantine."""

    phase: Phase = Phase.EVENT

    def judge(self, event: DesktopEvent) -> Finding | None:
        if isinstance(event, Quarantined):
            raise RuntimeError("planted in an event")
        return None


@attrs.define
class HostilePlugin:
    """Registers all three."""

    gate: HostileGate

    @hookimpl
    def drums_register_gates(self, register: Any) -> None:
        register("hostile", lambda: self.gate)
        register("hostile_event", HostileEventGate)
        register("late", lambda: LateGate(self.gate.how))


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """Desktops side by side, of which some meet a gate that misbehaves."""
    outcomes: dict[str, Any] = {}
    gate = HostileGate({})
    config = attrs.evolve(load_config(), gate_timeout_s=GATE_TIMEOUT_S, extra_required_gates=REQUIRED)
    witness = Witness()

    async def one(host: Host, how: str) -> None:
        def told(slot: Slot) -> None:
            gate.how[slot.id] = how

        async with await host.create(on_slot=told) as slot:
            if how == "quarantined":
                slot.quarantine("planted")
            outcomes[how] = await judged(slot, until=["hostile"])

    async def verified(host: Host, how: str) -> None:
        def told(slot: Slot) -> None:
            gate.how[slot.id] = how

        async with await host.create(make_task(), on_slot=told) as slot:
            outcomes[how] = await slot.verify(strict=False)

    async def main() -> None:
        plugins = build_manager([("hostile", HostilePlugin(gate))])
        async with open_host(config, plugins=plugins, interposer=witness) as host, trio.open_nursery() as nursery:
            for how in ("raises", "hangs", "fails", "lies", "quarantined", "well", "well too"):
                nursery.start_soon(one, host, how)
            for how in ("late", "in time"):
                nursery.start_soon(verified, host, how)

    trio.run(main)
    outcomes["left"] = witness.left_over(config.state_dir)
    yield outcomes


REASONS = {
    "raises": "the gate itself failed: RuntimeError: planted",
    "hangs": f"the gate gave no result within {GATE_TIMEOUT_S:g} s",
    "fails": "planted",
    "lies": "the gate returned bool instead of a Finding",
}


@requires("root", "criu")
@pytest.mark.parametrize("how", REASONS)
def test_a_gate_that_misbehaves_fails_its_episode(found: dict[str, Any], how: str) -> None:
    """With the reason, and the plugin that it comes from; all other gates have passed."""
    outcome: Outcome = found[how]
    assert outcome.failing() == {"hostile"} == set(outcome.bad_gates) and outcome.verdict == "invalid"
    line = outcome.lines["hostile"]
    assert line["reason"] == REASONS[how] and line["cause"] == "infrastructure"
    assert line["plugin"]["name"] == "hostile" and line["plugin"]["distribution"] == "embedded"
    assert outcome.passing() >= set(SPECIFIED_GATES)


@requires("root", "criu")
@pytest.mark.parametrize("how", ["well", "well too"])
def test_it_costs_nobody_else(found: dict[str, Any], how: str) -> None:
    """Desktops that were made beside it are valid."""
    assert found[how].verdict == "valid" and "hostile" in found[how].passing()


@requires("root", "criu")
def test_an_event_gate_that_raises(found: dict[str, Any]) -> None:
    """It is a failure of its own, beside that of the gate that works."""
    outcome: Outcome = found["quarantined"]
    assert outcome.failing() == {"not_quarantined", "hostile_event"}
    assert "the gate itself failed: RuntimeError: planted in an event" in outcome.lines["hostile_event"]["reason"]
    assert found["left"] == []


def test_a_required_gate_of_the_verify(found: dict[str, Any]) -> None:
    """It holds no verdict up, every verify runs it, and the reward is not valid when it fails."""
    late, in_time = found["late"], found["in time"]
    assert (late.valid, late.bad_gates, late.invalid_reasons) == (False, ("late",), ("late: planted late",))
    assert (in_time.valid, in_time.score, in_time.bad_gates) == (True, 0.0, ())
