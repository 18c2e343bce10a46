"""What an agent gets that does nothing but give up, on every task of OSWorld: the base rates of `docs/trust.md`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import trio
from test_osworld_catalogue import checkout  # noqa: F401 - the fixture is used by being here

from drums_core.abc import CheckContext
from drums_core.config import HostConfig
from drums_core.model import SetupStep, Task
from drums_osworld.catalogue import OSWorldCatalogue
from drums_osworld.checker import OSWorldChecker

TRUST = Path(__file__).parents[1] / "docs/trust.md"


async def score(checker: OSWorldChecker, task: Task, action: str | None, scratch: Path) -> float:
    """Where no function of OSWorld's is asked: nothing serves a desktop."""

    async def steps(_: Sequence[SetupStep]) -> None:
        await trio.lowlevel.checkpoint()

    async def serve(_: int) -> None:
        raise AssertionError("a desktop was asked")

    return await checker.check(CheckContext(task, action, serve, [], steps, scratch))


async def test_giving_up_scores_on_infeasible_tasks_alone(
    checkout: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """On every task, and as many as the document says; on those, doing nothing scores 0."""
    config = HostConfig(osworld=checkout)
    checker, tasks = OSWorldChecker(config), OSWorldCatalogue(config).tasks()
    infeasible = [x for x in tasks if x.evaluator["func"] == "infeasible"]
    gained = [x for x in tasks if await score(checker, x, "FAIL", tmp_path) > 0]
    assert gained == infeasible
    for task in infeasible:
        for action in (None, "DONE", "WAIT", "fail", "FAIL ", "pyautogui.click() # FAIL"):
            assert await score(checker, task, action, tmp_path) == 0.0
    said = re.search(r"FAIL on every task .* (\d+) of (\d+)", TRUST.read_text(encoding="utf-8"))
    assert said is not None and [int(x) for x in said.groups()] == [len(infeasible), len(tasks)]
