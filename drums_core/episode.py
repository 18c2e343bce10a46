"""One judged life of a desktop: its gate results, its verdict, and who waits for it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from drums.errors import InvalidEpisode
from drums_core.abc import Pinned
from drums_core.model import Cause, GateResult, Json, Phase, PluginId, Status, Validity, Verdict
from drums_core.verdict import judge

_RANK = {Status.PENDING: 0, Status.PASS: 1, Status.FAIL: 2}


@attrs.define(eq=False)
class Episode:
    """From a create, a reset or a fork until the next reset or the close.

    Args:
        slot: the slot's id.
        origin: `create`, `reset` or `fork`.
        required: phase and plugin of each gate that must pass.
        on_change: called with each new verdict; must not block.
        task: the id of its task, or None.
        pinned: what will score it, where that could change meanwhile.
        labels: what its creator calls it: the policy that acts in it, say.
        parent: a fork's parent episode, with how many results it had when the desktop was dumped.
    """

    slot: str
    origin: str
    required: Mapping[str, tuple[Phase, PluginId]]
    on_change: Callable[[Episode, Validity], None]
    task: str | None = None
    parent: tuple[Episode, int] | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    pinned: Pinned | None = None
    id: str = attrs.field(factory=lambda: f"e-{uuid.uuid4().hex[:16]}")
    started_at: float = attrs.field(factory=time.time)
    results: list[GateResult] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    outputs: dict[str, str] = attrs.field(factory=dict)  # of commands, kept for the checker
    actions: int = 0
    last_action: str | None = None
    listened: frozenset[int] = frozenset()  # the ports that programs listened on when the agent began
    closed: bool = False
    _validity: Validity = attrs.field(factory=lambda: Validity(Verdict.PENDING))
    _judged: trio.Event = attrs.field(factory=trio.Event)

    @property
    def validity(self) -> Validity:
        """The verdict as of now."""
        return self._validity

    def add(self, results: Sequence[GateResult]) -> None:
        """Add results; the verdict may change, and never from invalid."""
        self.results.extend(results)
        before = self._validity
        self._validity = judge(self.required, self.results)
        if self._validity.verdict is not Verdict.PENDING:
            self._judged.set()
        if self._validity != before:
            self.on_change(self, self._validity)

    async def inherited(self, timeout_s: float) -> list[GateResult]:
        """What a fork's parent fails its child with: a copy of a broken desktop is broken.

        Everything counts that failed in the parent before the dump, or until its restored processes were judged; a
        parent that never was, in `timeout_s` seconds, fails the child as well.
        """
        if self.parent is None:
            return []
        parent, count = self.parent
        with trio.move_on_after(timeout_s):
            await parent.wait_judged()
        settled = [i for i, r in enumerate(parent.results) if r.phase is Phase.SETTLED]
        found = [r for r in parent.results[: max([count, *[i + 1 for i in settled]])] if r.status is Status.FAIL]
        if not settled and not found:
            name, (phase, plugin) = next((n, r) for n, r in self.required.items() if r[0] is Phase.SETTLED)
            why = "its restored processes were never judged"
            found = [GateResult(name, Status.FAIL, phase, plugin, reason=why, cause=Cause.INFRASTRUCTURE)]
        return [attrs.evolve(r, reason=f"inherited from episode {parent.id}: {r.reason}") for r in found]

    async def wait_judged(self) -> Validity:
        """Wait until the verdict is no longer pending, and return it."""
        await self._judged.wait()
        return self._validity

    async def wait_valid(self, timeout_s: float | None = None) -> None:
        """Return once the verdict is valid.

        Raises:
            InvalidEpisode: it is invalid.
            TimeoutError: it is still pending after `timeout_s` seconds.
        """
        with trio.move_on_after(timeout_s if timeout_s is not None else float("inf")):
            await self.wait_judged()
        # Not the scope decides: with no time left, a verdict that is there counts all the same.
        validity = self._validity
        if validity.verdict is Verdict.PENDING:
            raise TimeoutError(f"episode {self.id} is still pending after {timeout_s} s")
        if not validity.valid:
            raise InvalidEpisode(
                f"episode {self.id} is invalid: {'; '.join(validity.invalid_reasons)}",
                bad_gates=list(validity.bad_gates),
                invalid_reasons=list(validity.invalid_reasons),
            )

    def report(self) -> dict[str, Json]:
        """The gate report: a line per required gate, then what was added; and the verdict."""
        lines: list[dict[str, Any]] = []
        seen: dict[str, GateResult] = {}
        for result in self.results:
            # The first failure of a gate is its line: what follows a failure is often its echo.
            if result.gate not in seen or _RANK[result.status] > _RANK[seen[result.gate].status]:
                seen[result.gate] = result
        for name, (phase, plugin) in self.required.items():
            if name in seen:
                lines.append(_line(seen.pop(name)))
            else:
                lines.append({"gate": name, "status": "pending", "phase": phase.value, "plugin": attrs.asdict(plugin)})
        lines += [_line(result) for result in seen.values()]
        return {
            "episode": self.id,
            "origin": self.origin,
            "gates": {"gates": lines},
            "validity": {
                "verdict": self._validity.verdict.value,
                "valid": self._validity.valid,
                "bad_gates": list(self._validity.bad_gates),
                "invalid_reasons": list(self._validity.invalid_reasons),
                "causes": [c.value for c in self._validity.causes],
            },
        }


def _line(result: GateResult) -> dict[str, Any]:
    line = attrs.asdict(result)
    line["status"], line["phase"] = result.status.value, result.phase.value
    line["cause"] = result.cause.value if result.cause else None
    return line
