"""What a check of a real desktop makes of what is missing: evidence where the desktop says so, else no score."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from desktops import Played, Scenario, make_task, play, run
from requires import requires

from drums_core.host import Host
from drums_core.model import Reward, SetupStep, Task

pytestmark = requires("root", "criu")

LETTER = "until wmctrl -l | grep -q letter.txt; do sleep 0.1; done"


def task(result: dict[str, Any], *steps: SetupStep, postconfig: list[Any] | None = None) -> Task:
    evaluator = {
        "func": "check_include_exclude",
        "result": result,
        "expected": {"type": "rule", "rules": {"include": ["letter.txt"], "exclude": []}},
        "postconfig": postconfig or [],
    }
    return attrs.evolve(make_task(*steps), evaluator=evaluator)


def verified(what: Task, act: str) -> Scenario:
    async def scenario(host: Host) -> Reward:
        async with await host.create(what) as slot:
            await run(slot, act)
            return await slot.verify(strict=False)

    return scenario


OWN = {"type": "vm_command_line", "command": ["/home/user/own-program"]}
GONE = [{"type": kind, "parameters": {"command": ["/home/user/own-program"]}} for kind in ("execute", "launch")]
EDITOR = SetupStep("launch", {"command": ["mousepad", "/home/user/letter.txt"]})
SHOWN = SetupStep("execute", {"command": LETTER, "shell": True})
SCENARIOS: dict[str, Scenario] = {
    "never made": verified(task(OWN, postconfig=GONE), "true"),
    "made": verified(task(OWN), "printf '#!/bin/sh\\necho letter.txt\\n' > ~/own-program; chmod +x ~/own-program"),
    "stopped": verified(task({"type": "accessibility_tree"}, EDITOR, SHOWN), "pkill -STOP mousepad"),
}


@pytest.fixture(scope="module")
def played() -> Played:
    return play(SCENARIOS)


def test_a_program_that_the_agent_did_not_make_scores_0(played: Played) -> None:
    """Its absence is evidence, in the checker's command as in the steps before it; those are noted."""
    reward = played["never made"]
    assert (reward.score, reward.checker_error) == (0.0, None)
    assert [x.partition(":")[0] for x in reward.provenance["graded"]["notes"]] == ["execute", "launch"]
    assert played["made"].score == 1.0, played["made"].checker_error


def test_an_application_that_does_not_answer_gives_no_score(played: Played) -> None:
    """Without its part of the tree it would be 0, and the application is named."""
    reward = played["stopped"]
    assert reward.score is None
    assert "mousepad (process" in reward.checker_error and "does not answer" in reward.checker_error


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
