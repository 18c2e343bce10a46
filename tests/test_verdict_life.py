"""Verdicts over the lives of daemons: gates that fail, raise and lie, late events, restarts, and what the journal says.

A hypothesis state machine over the real parts: `GateSet`, `Episode`, and the journal that outlives the daemon.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_gating import VIEW, PlantedEventGate, PlantedGate

from drums_core.durable import take_lock
from drums_core.episode import Episode
from drums_core.gating import GateSet
from drums_core.journal import ALIVE, Journal, open_journal, read_episode
from drums_core.model import (
    Finding,
    GateResult,
    Phase,
    PluginId,
    ProcessDied,
    Quarantined,
    Status,
    Verdict,
    failed,
    passed,
)
from drums_core.plugins import Registry

PHASES = {"early": Phase.RESTORED, "late": Phase.SETTLED, "last": Phase.SETTLED}
"""The required gates."""
EXTRA = "extra"  # a gate that nobody requires
LIE = GateResult("late", Status.PASS, Phase.SETTLED, PluginId("late", "drums", "1"))
ANSWERS: dict[str, Callable[[], Any]] = {
    "pass": passed,
    "fail": lambda: failed("planted"),
    "raise": lambda: 1 / 0,
    "nothing": lambda: None,
    "truthy": lambda: Finding(1),  # type: ignore[arg-type]
    "another gate": lambda: LIE,
}
answers = st.sampled_from(["pass"] * 15 + sorted(ANSWERS))  # most, so that there are valid episodes to break


class Life(RuleBasedStateMachine):
    """One slot on a host that may end at any moment, with all episodes that it ever had."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Path(tempfile.mkdtemp())
        self.told: dict[str, list[Verdict]] = {}
        self.over: dict[str, str] = {}  # episodes that have ended: id -> the verdict that has to stand
        self.answers: dict[str, str] = {}
        self.broken = False  # whether the current episode has failed a gate
        self.passes: set[str] = set()
        registry = Registry()
        for name in (*PHASES, EXTRA):
            gate = PlantedGate(self._checking(name), phase=PHASES.get(name, Phase.SETTLED), records=name == "early")
            registry.gates[name] = (lambda gate=gate: gate, PluginId(name, "planted", "1"))  # type: ignore[misc]
        event = PlantedEventGate(
            lambda event: None if isinstance(event, ProcessDied) and not event.signal else failed("e")
        )
        registry.gates["event"] = (lambda: event, PluginId("event", "planted", "1"))
        self.gates = GateSet(5.0, GateSet.build(registry, timeout_s=5.0)._gates, frozenset(PHASES))

    def _checking(self, name: str) -> Callable[..., Any]:
        async def check(*_: object) -> Any:
            return ANSWERS[self.answers[name]]()

        return check

    # --- the daemon

    @initialize()
    def open(self) -> None:
        self.instance = f"h-{uuid.uuid4().hex[:12]}"
        runtime = self.state / "run" / self.instance
        runtime.mkdir(parents=True)
        self.lock = take_lock(runtime / ALIVE)
        self.journal: Journal = open_journal(self.state, self.instance)
        self.begin()

    def begin(self) -> None:
        self.episode = Episode("s", "create", self.gates.required, self._changed)
        self.told[self.episode.id] = []
        self.broken, self.passes = False, set()
        self.journal.episode_started(self.episode, task_sha256=None, image=("i", "d"), base="c")
        self.write()

    def _changed(self, episode: Episode, validity: Any) -> None:
        self.journal.judged(episode, validity)
        self.told[episode.id].append(validity.verdict)

    def write(self) -> None:
        """What `run` and `flush` do in an open host."""

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.journal.run)
                await self.journal.flush()
                nursery.cancel_scope.cancel()

        trio.run(main)

    # --- what happens

    @rule(
        phase=st.sampled_from([Phase.RESTORED, Phase.SETTLED]), given=st.tuples(*[answers] * 4), recorded=st.booleans()
    )
    def check(self, phase: Phase, given: tuple[str, ...], recorded: bool) -> None:
        """The gates of a phase, with and without evidence; maybe again."""
        self.answers = dict(zip((*PHASES, EXTRA), given, strict=True))
        evidence = {"early": 1} if recorded else {}
        results = trio.run(self.gates.check, phase, VIEW, evidence)
        self.episode.add(results)
        asked = [name for name in (*PHASES, EXTRA) if PHASES.get(name, Phase.SETTLED) is phase]
        assert [r.gate for r in results] == asked  # each under its own name, whatever it answered
        for name in asked:
            if self.answers[name] == "pass" and (recorded or name != "early"):
                self.passes.add(name)
            else:
                self.broken = True
        self.write()

    @rule(signal=st.sampled_from([0, 11]))
    def death(self, signal: int) -> None:
        """At any time: before there is a verdict, and long after."""
        event = ProcessDied(1, 1, "x", signal, 0, False, False)
        self.episode.add(self.gates.judge_event(event))
        self.broken = self.broken or bool(signal)
        self.write()

    @rule(times=st.integers(1, 2))
    def quarantine(self, times: int) -> None:
        for _ in range(times):
            self.journal.quarantined(self.episode, "planted", True)
            self.episode.add(self.gates.judge_event(Quarantined("planted")))
        self.broken = True
        self.write()

    @rule()
    def reset(self) -> None:
        """The episode ends with the verdict that it has; a new one begins."""
        self.journal.episode_ended(self.episode)
        self.over[self.episode.id] = self.episode.validity.verdict.value
        self.begin()

    @rule()
    def restart(self) -> None:
        """The daemon is killed and started anew: what was open was not watched to its end, and is invalid."""
        self.over[self.episode.id] = "invalid"
        self.journal._db.close()
        os.close(self.lock)
        self.open()

    @rule()
    def end_in_order(self) -> None:
        """The daemon ends its episodes and closes."""
        self.journal.episode_ended(self.episode)
        self.over[self.episode.id] = self.episode.validity.verdict.value
        self.write()
        self.journal.close()
        os.close(self.lock)
        self.open()

    # --- what always holds

    @invariant()
    def the_verdict_is_that_of_the_rules(self) -> None:
        verdict = self.episode.validity.verdict
        if self.broken:
            assert verdict is Verdict.INVALID
        else:
            assert verdict is (Verdict.VALID if set(PHASES) <= self.passes else Verdict.PENDING)

    @invariant()
    def invalid_never_returns(self) -> None:
        for verdicts in self.told.values():
            order = [[Verdict.PENDING, Verdict.VALID, Verdict.INVALID].index(v) for v in verdicts]
            assert order == sorted(order)

    @invariant()
    def the_journal_says_the_same(self) -> None:
        stored = read_episode(self.state, self.episode.id)
        assert stored["verdict"] == self.episode.validity.verdict.value
        assert stored["ended_at"] is None
        assert set(stored["bad_gates"]) == set(self.episode.validity.bad_gates)

    @precondition(lambda self: self.over)
    @invariant()
    def what_is_over_stands(self) -> None:
        for identity, verdict in self.over.items():
            stored = read_episode(self.state, identity)
            assert stored["verdict"] == verdict and stored["ended_at"]
            if verdict == "valid":
                assert {x["gate"] for x in stored["gates"] if x["status"] == "pass"} >= set(PHASES)

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            os.close(self.lock)
        shutil.rmtree(self.state)


Life.TestCase.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
TestLife = Life.TestCase
