"""Running gates: recording at a dump, checking by phase, judging events. Fails closed.

A gate that raises, takes too long, or whose evidence is missing fails, with the reason; it costs no other gate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import attrs
import structlog
import trio

from drums.errors import DumpError
from drums_core.abc import DesktopView, EventGate, Gate
from drums_core.model import (
    Cause,
    DesktopEvent,
    Finding,
    GateResult,
    Json,
    Phase,
    PluginId,
    Status,
    failed,
)
from drums_core.plugins import Registry
from drums_core.verdict import SPECIFIED_GATES

_log = structlog.get_logger("drums.gates")
_NOT_AWAITED = (Phase.VERIFY, Phase.EVENT)


@attrs.frozen
class _Loaded:
    name: str
    gate: Gate | EventGate
    plugin: PluginId


@attrs.define
class GateSet:
    """The gates of a host, made once from the registry's factories."""

    timeout_s: float
    _gates: Sequence[_Loaded]
    required_names: frozenset[str]

    @classmethod
    def build(cls, registry: Registry, *, timeout_s: float, extra_required: Sequence[str] = ()) -> GateSet:
        """Make every registered gate."""
        loaded = [_Loaded(name, factory(), plugin) for name, (factory, plugin) in registry.gates.items()]
        return cls(timeout_s, loaded, frozenset({*SPECIFIED_GATES, *extra_required}))

    @property
    def required(self) -> Mapping[str, tuple[Phase, PluginId]]:
        """Phase and plugin of each gate that must pass before an episode is valid, in the order of the phases.

        A gate of events passes by having nothing to say, and one of the phase `verify` looks once the verdict is there:
        every verify runs it, and if it fails, the reward is not valid. Required, both have to be loaded.
        """
        order = list(Phase)
        needed = [g for g in self._gates if g.name in self.required_names and g.gate.phase not in _NOT_AWAITED]
        return {g.name: (g.gate.phase, g.plugin) for g in sorted(needed, key=lambda g: order.index(g.gate.phase))}

    @property
    def recording(self) -> frozenset[str]:
        """The gates that need evidence of a checkpoint."""
        return frozenset(g.name for g in self._gates if not isinstance(g.gate, EventGate) and g.gate.records)

    def listing(self) -> list[tuple[str, Phase, PluginId]]:
        """Name, phase and plugin of every gate, in the order of the phases."""
        order = list(Phase)
        found = [(g.name, g.gate.phase, g.plugin) for g in self._gates]
        return sorted(found, key=lambda x: order.index(x[1]))

    def plugin_ids(self) -> list[PluginId]:
        """Every gate's plugin."""
        return [g.plugin for g in self._gates]

    async def record(self, view: DesktopView) -> dict[str, Json]:
        """Evidence of a frozen desktop by gate name.

        Raises:
            DumpError: a gate could not record: a checkpoint without its evidence is none.
        """
        evidence: dict[str, Json] = {}
        for loaded in self._gates:
            if isinstance(loaded.gate, EventGate) or not loaded.gate.records:
                continue
            try:
                with trio.fail_after(self.timeout_s):
                    evidence[loaded.name] = await loaded.gate.record(view)
            except Exception as e:
                told = f"gate {loaded.name!r} could not record its evidence: {type(e).__name__}: {e}"
                raise DumpError(told) from e
        return evidence

    async def check(self, phase: Phase, view: DesktopView, evidence: Mapping[str, Json]) -> list[GateResult]:
        """The results of all gates of one phase, one after another.

        They read proc, call by call, and every call lets go of the interpreter's lock: side by side the same gates take
        half as long again, and a `duration_ms` would be the others' (`benchmarks/gate_cost.py`).
        """
        results = []
        for loaded in self._gates:
            if loaded.gate.phase is phase and not isinstance(loaded.gate, EventGate):
                began = time.perf_counter()
                finding = await self._finding(loaded.name, loaded.gate, view, evidence)
                results.append(_result(loaded, phase, finding, (time.perf_counter() - began) * 1e3))
        return results

    async def _finding(self, name: str, gate: Gate, view: DesktopView, evidence: Mapping[str, Json]) -> Finding:
        if gate.records and name not in evidence:
            return failed(f"the checkpoint holds no evidence of gate {name!r}", observed=None, expected="evidence")
        # `guest_ready` itself waits that long, and its own reason says more than this one's.
        limit = self.timeout_s + (view.ready_limit_s if gate.phase is Phase.READY else 0.0)
        try:
            with trio.fail_after(limit):
                finding = await gate.check(view, evidence.get(name))
        except trio.TooSlowError:
            return failed(f"the gate gave no result within {limit:g} s")
        except Exception as e:  # noqa: BLE001 - fails closed, with the reason
            _log.exception("gate raised", gate=name, slot=view.slot)
            return failed(f"the gate itself failed: {type(e).__name__}: {e}")
        return _usable(finding)

    def judge_event(self, event: DesktopEvent) -> list[GateResult]:
        """The failed results that an event adds."""
        results = []
        for loaded in self._gates:
            if not isinstance(loaded.gate, EventGate):
                continue
            try:
                finding = loaded.gate.judge(event)
                if finding is not None:
                    finding = _usable(finding)
            except Exception as e:  # noqa: BLE001 - fails closed, with the reason
                _log.exception("event gate raised", gate=loaded.name)
                finding = failed(f"the gate itself failed: {type(e).__name__}: {e}")
            if finding is not None and finding.ok is not True:
                results.append(_result(loaded, Phase.EVENT, finding, 0.0))
        return results


def _usable(finding: object) -> Finding:
    """A gate's finding, or the failed one of a gate that returned something else."""
    if not isinstance(finding, Finding):
        return failed(f"the gate returned {type(finding).__name__} instead of a Finding")
    if finding.cause not in tuple(Cause):
        return attrs.evolve(finding, cause=Cause.INFRASTRUCTURE)
    return finding


def _result(loaded: _Loaded, phase: Phase, finding: Finding, duration_ms: float) -> GateResult:
    ok = finding.ok is True
    return GateResult(
        gate=loaded.name,
        status=Status.PASS if ok else Status.FAIL,
        phase=phase,
        plugin=loaded.plugin,
        reason="" if ok else finding.reason,
        cause=None if ok else Cause(finding.cause),
        observed=None if ok else finding.observed,
        expected=None if ok else finding.expected,
        duration_ms=round(duration_ms, 3),
    )
