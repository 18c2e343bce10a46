"""One fault tried: what was planted, what every gate said, and whether that is what it had to say."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from drums_core.model import Json, Reward, Verdict
from drums_core.selftest.checker import SelftestChecker
from drums_core.selftest.stage import as_interposition, shell
from drums_core.slot import Slot
from drums_core.testing.faults import Armed, By, Fault, NotOnThisHost, Point

JUDGED_WITHIN_S = 60.0


@attrs.frozen
class Trial:
    """What came of one fault.

    Args:
        fault: the fault.
        lines: gate -> its line in the report.
        verdict: the episode's.
        reasons: its reasons.
        causes: its causes.
        required: the gates that had to have a result.
        reward: of a desktop that was verified.
        problem: why the fault was not tried, "" when it was.
        skipped: whether this host has no such thing, so that nothing could be tried.
    """

    fault: Fault
    lines: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    verdict: str = ""
    reasons: Sequence[str] = ()
    causes: Sequence[str] = ()
    required: Sequence[str] = ()
    reward: Reward | None = None
    problem: str = ""
    skipped: bool = False

    @property
    def failing(self) -> set[str]:
        """The gates whose line says so."""
        return {gate for gate, line in self.lines.items() if line["status"] == "fail"}

    def misses(self) -> list[str]:
        """In which ways the fault was not seen as it must be; empty when it was caught."""
        if self.skipped:
            return []
        if self.problem:
            return [f"not tried: {self.problem}"]
        found = [f"{gate} did not fail" for gate in self.fault.gates if gate not in self.failing]
        if self.fault.harmless:
            return found
        if self.verdict != Verdict.INVALID:
            found.append(f"the verdict is {self.verdict}, expected invalid")
        elif set(self.causes) != {self.fault.cause}:
            found.append(f"the causes are {list(self.causes)}, expected {self.fault.cause}")
        if self.reward is not None and (self.reward.valid or not set(self.fault.gates) <= set(self.reward.bad_gates)):
            found.append(f"its reward is {'valid' if self.reward.valid else f'bad by {list(self.reward.bad_gates)}'}")
        return found

    def false_alarms(self) -> list[str]:
        """Gates that did not pass though the fault is not about them, in words."""
        if self.problem or self.skipped:
            return []
        found = [f"{gate}: {self.lines[gate]['reason']}" for gate in sorted(self.failing - set(self.fault.gates))]
        lines = self.lines
        pending = [g for g in self.required if g not in lines or lines[g]["status"] == "pending"]
        return found + [f"{gate} gave no result" for gate in pending]

    def unsaid(self) -> list[str]:
        """Words that the first gate's reason should hold and does not."""
        if not self.fault.gates or self.fault.gates[0] not in self.lines:
            return []
        reason = self.lines[self.fault.gates[0]]["reason"]
        return [words for words in self.fault.says if words not in reason]

    def document(self) -> dict[str, Json]:
        """As JSON."""
        return {
            "fault": self.fault.name,
            "about": self.fault.about,
            "expected": list(self.fault.gates),
            "caught_by": sorted(self.failing & set(self.fault.gates)),
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "missed": self.misses(),
            "false_alarms": self.false_alarms(),
            "skipped": self.problem if self.skipped else "",
        }


async def try_on(slot: Slot, armed: Armed, checker: SelftestChecker) -> Trial:
    """Carry a fault through on a desktop that has just been handed out, and say what came of it.

    Args:
        slot: the desktop; it is left as it is.
        armed: the fault, armed for this desktop where it is made before the desktop is handed out.
        checker: the host's, for what is done while it looks.
    """
    fault = armed.fault
    reward: Reward | None = None
    try:
        if fault.point is Point.UP:
            await _act(slot, armed)
        await _until_judged(slot, ())
        if fault.point is Point.VALID:
            await _act(slot, armed)
        if fault.point is Point.VERIFY:
            if fault.by is By.AGENT:
                await slot.execute("true", shell=True)  # it has acted
            assert slot.task is not None
            checker.during[slot.task.id] = lambda: _act(slot, armed, verifying=True)
            reward = await slot.verify(strict=False)
        if armed.problem is None and not armed.planted:
            return Trial(fault, problem=f"its point {fault.point} never came")
        await _until_judged(slot, fault.gates)
    except Exception as e:  # noqa: BLE001 - a trial that breaks off is a miss, with its reason
        armed.problem = armed.problem or e
    if armed.problem is not None:
        text = "".join(traceback.format_exception_only(armed.problem)).strip()
        return Trial(fault, problem=text, skipped=isinstance(armed.problem, NotOnThisHost))
    return trial_of(slot, fault, reward)


def trial_of(slot: Slot, fault: Fault, reward: Reward | None = None) -> Trial:
    """What a desktop's report says as of now."""
    report = slot.gates()
    validity = report["validity"]
    return Trial(
        fault,
        lines={line["gate"]: line for line in report["gates"]["gates"]},
        verdict=validity["verdict"],
        reasons=validity["invalid_reasons"],
        causes=validity["causes"],
        required=tuple(slot.episode.required),
        reward=reward,
    )


async def _act(slot: Slot, armed: Armed, *, verifying: bool = False) -> None:
    fault = armed.fault
    if fault.by is By.USER:
        await trio.sleep(fault.arguments.get("after_s", 0.0))
        for _ in range(fault.arguments.get("times", 1)):
            slot.quarantine(fault.action)
    elif fault.by is By.AGENT:
        if verifying:  # the slot takes no action then; what the agent left there does not ask
            await shell(slot, fault.action)
        else:
            await slot.execute(fault.action, shell=True, timeout_s=60.0)
    else:
        await armed.plant(as_interposition(slot, fault.point))
    armed.planted = True


async def _until_judged(slot: Slot, gates: Sequence[str]) -> None:
    """Until every required gate has a result, whatever the verdict was before, and these have failed; or a while."""
    with trio.move_on_after(JUDGED_WITHIN_S):
        while True:
            lines = {line["gate"]: line["status"] for line in slot.gates()["gates"]["gates"]}
            done = all(lines.get(gate, "pending") != "pending" for gate in slot.episode.required)
            if done and all(lines.get(gate) == "fail" for gate in gates):
                return
            await trio.sleep(0.25)
