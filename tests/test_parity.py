"""Our scores beside those of OSWorld's own `DesktopEnv`, on real desktops; and that a difference is told."""

from __future__ import annotations

import os
from typing import Any

import attrs
import pytest
from desktops import Played, make_task, play
from requires import requires

from drums_core import load_config
from drums_core.host import Host
from drums_core.model import SetupStep, Task
from drums_core.slot import Slot
from drums_osworld.catalogue import OSWorldCatalogue
from drums_osworld.parity.comparison import Answer, Line, ask_reference, compare_state, compare_task, report, same
from drums_osworld.parity.states import RIGHT, State, states_of, without_applications

needs_desktops = requires("root", "criu")

URL = "https://example.org/resolve/main/{}"
FILES = {
    "func": "compare_table",
    "result": {"type": "vm_file", "path": "/home/user/a.xlsx", "dest": "a.xlsx"},
    "expected": {"type": "cloud_file", "path": URL.format("gold.xlsx"), "dest": "gold.xlsx"},
}


def files_task(**evaluator: Any) -> Task:
    download = SetupStep("download", {"files": [{"url": URL.format("in.xlsx"), "path": "/home/user/a.xlsx"}]})
    launch = SetupStep("open", {"path": "/home/user/a.xlsx"})
    return attrs.evolve(make_task(download, launch), evaluator={**FILES, **evaluator}, applications=("soffice",))


def test_states_follow_from_the_evaluator() -> None:
    others = [URL.format(x) for x in ("gold.xlsx", "x.docx", "x.xlsx")]
    states = {x.name: dict(x.files) for x in states_of(files_task(), others)}
    assert states == {
        "untouched": {},
        RIGHT: {"/home/user/a.xlsx": URL.format("gold.xlsx")},
        "wrong: another task's file as the result": {"/home/user/a.xlsx": URL.format("x.xlsx")},
        "wrong: an empty file as the result": {"/home/user/a.xlsx": None},
        "gave up": {},
    }
    new = files_task(result={"type": "vm_file", "path": "/home/user/new.xlsx", "dest": "new.xlsx"})
    assert "wrong: the input as the result" in [x.name for x in states_of(new, others)]
    assert [x.name for x in states_of(make_task())] == ["untouched", "gave up"]


def test_a_task_without_its_applications() -> None:
    task = without_applications(files_task(postconfig=[{"type": "sleep", "parameters": {"seconds": 1}}]))
    assert [x.type for x in task.config] == ["download"] and task.applications == ()
    assert "postconfig" not in task.evaluator
    with pytest.raises(ValueError, match="vm_command_line"):
        without_applications(make_task())


@pytest.mark.parametrize(
    ("ours", "reference", "equal"),
    [
        (Answer(0.5), Answer(0.5), True),
        (Answer(0.5), Answer(0.6), False),
        (Answer(0.0), Answer(None, "KeyError: 'a'"), False),
        (Answer(None, "the worker ended: KeyError"), Answer(0.0), False),
        (Answer(None, "OSWorld's 'f' raised KeyError: 'a'"), Answer(None, "KeyError: 'a'"), True),
        (Answer(None, "OSWorld's 'f' raised ValueError"), Answer(None, "KeyError: 'a'"), False),
    ],
)
def test_what_is_equal(ours: Answer, reference: Answer, equal: bool) -> None:
    assert same(ours, reference) is equal


def test_report_tells_each_kind_of_line() -> None:
    lines = [
        Line("a", "untouched", Answer(0.0), Answer(0.0), Answer(0.0)),
        Line("a", RIGHT, Answer(0.0), Answer(0.0), Answer(0.0)),
        Line("b", "untouched", Answer(0.0), Answer(1.0), Answer(0.0)),
        Line("b", "gave up", problem="no desktop"),
    ]
    found = report(lines)
    assert (found["tasks"], found["states"], found["compared"]) == (2, 4, 3)
    assert [(x["task"], x["what"]) for x in found["differences"]] == [("b", "in place gives 1.0, the reference 0.0")]
    assert [x["task"] for x in found["own_expected_fails"]] == ["a"]
    assert found["not_run"] == [{"task": "b", "state": "gave up", "reason": "no desktop"}]


# --- on real desktops

RAISES = {
    "func": "check_list",
    "result": {"type": "cache_file", "path": "never-made"},
    "expected": {"type": "rule", "rules": {"expect": ["x"]}},
}


async def otherwise(slot: Slot, task: Task, state: State) -> Answer:
    """The reference, asked about the opposite: the planted difference."""
    evaluator = {**task.evaluator, "expected": {"type": "rule", "rules": {"expected": "no\n"}}}
    return await ask_reference(slot, attrs.evolve(task, evaluator=evaluator), state)


async def equal(host: Host) -> list[Line]:
    return await compare_task(host, make_task())


async def done(host: Host) -> list[Line]:
    async with await host.create(make_task(SetupStep("execute", {"command": ["mkdir", "/home/user/done"]}))) as slot:
        right = State("done")
        return [
            await compare_state(slot, make_task(), right),
            await compare_state(slot, make_task(), right, otherwise),
        ]


async def raising(host: Host) -> list[Line]:
    task = attrs.evolve(make_task(), evaluator=RAISES)
    async with await host.create(task) as slot:
        return [await compare_state(slot, task, State("untouched"))]


@pytest.fixture(scope="module")
def played() -> Played:
    return play({"equal": equal, "done": done, "raising": raising})


@needs_desktops
def test_equal_scores_are_no_difference(played: Played) -> None:
    found = report(played["equal"])
    assert found["compared"] == 2 and not found["differences"] and not found["not_run"], found
    assert [(x["state"], x["drums"]) for x in found["lines"]] == [("untouched", "0.0"), ("gave up", "0.0")]


@needs_desktops
def test_a_planted_difference_is_told(played: Played) -> None:
    alike, planted = played["done"]
    assert (alike.reference, alike.difference, alike.problem) == (Answer(1.0), "", "")
    assert planted.difference == "the copy gives 1.0, the reference 0.0; in place gives 1.0, the reference 0.0"


@needs_desktops
def test_exceptions_are_compared(played: Played) -> None:
    (line,) = played["raising"]
    assert line.problem == "" and line.difference == ""
    assert line.reference.error.startswith("AssertionError")


@needs_desktops
def test_nothing_is_left(played: Played) -> None:
    assert played.left == []


WIDE = ("1273e544", "0e47de2a", "7dbc52a6")


@pytest.mark.applications
@needs_desktops
def test_parity_with_applications() -> None:
    """Of a table, a text and slides, opened in their applications, with their whole set-up and postconfig."""
    config = load_config()
    if config.osworld is None:
        pytest.skip("DRUMS_OSWORLD names no checkout")
    for package in ("openpyxl", "docx", "pptx", "pandas"):
        pytest.importorskip(package)
    catalogue = OSWorldCatalogue(config)

    def scenario(prefix: str) -> Any:
        async def compare(host: Host) -> list[Line]:
            return await compare_task(host, catalogue.find(prefix), image="osworld")

        return compare

    played = play({x: scenario(x) for x in WIDE}, at_once=min(2, os.cpu_count() or 1))
    found = report([line for x in WIDE for line in played[x]])
    assert found["compared"] == found["states"] and not found["differences"], found
