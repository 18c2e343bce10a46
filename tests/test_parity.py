"""Our scores beside those of OSWorld's own `DesktopEnv`, on real desktops; and that a difference is told."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner
from desktops import Played, make_task, play
from requires import requires

from drums.errors import DrumsError
from drums.reward import Reward, Verdict
from drums_core import load_config
from drums_core.config import HostConfig
from drums_core.host import Host
from drums_core.model import SetupStep, Task
from drums_core.slot import Slot
from drums_osworld.catalogue import OWN_TASKS, OSWorldCatalogue
from drums_osworld.parity import command, states
from drums_osworld.parity.comparison import (
    Answer,
    Line,
    answer_of,
    ask_reference,
    compare_state,
    compare_task,
    report,
    same,
)
from drums_osworld.parity.selection import select
from drums_osworld.parity.solutions import solutions
from drums_osworld.parity.states import RIGHT, State, states_of, without_applications

needs_desktops = requires("root", "criu")

URL = "https://huggingface.co/datasets/xlangai/ubuntu_osworld_file_cache/resolve/main/{}"
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


def test_what_the_host_could_not_have_graded_is_no_answer() -> None:
    def reward(**fields: Any) -> Reward:
        return Reward(score=None, valid=True, invalid_reasons=(), verdict=Verdict.VALID, bad_gates=(), **fields)

    failed = reward(checker_error="'f' raised KeyError", checker_error_cause="unknown")
    assert answer_of(failed) == Answer(None, "'f' raised KeyError")
    for fields in (
        {"checker_skipped": "quarantined: by hand"},
        {"checker_error": "the copy could not be restored", "checker_error_cause": "infrastructure"},
    ):
        with pytest.raises(DrumsError, match=r"it was not graded: (quarantined|the copy)"):
            answer_of(reward(**fields))


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


def test_report_tells_of_scripts_that_do_not_what_they_are_meant_to() -> None:
    lines = [
        Line("a", "untouched", Answer(0.0), Answer(0.0), Answer(0.0)),
        Line("a", "done: right", Answer(0.0), Answer(0.0), Answer(0.0)),
        Line("a", "done: wrong: less", Answer(1.0), Answer(1.0), Answer(1.0)),
        Line("b", "done: right", Answer(1.0), Answer(1.0), Answer(1.0)),
        Line("b", "done: wrong: less", Answer(None, "KeyError"), Answer(None, "KeyError"), Answer(None, "KeyError")),
        Line("c", "untouched", Answer(1.0), Answer(1.0), Answer(1.0)),
        Line("c", "done: wrong: less", Answer(1.0), Answer(1.0), Answer(1.0)),
    ]
    found = report(lines)
    assert [(x["task"], x["state"]) for x in found["own_solution_fails"]] == [
        ("a", "done: right"),
        ("a", "done: wrong: less"),
    ]
    assert found["done_already"] == ["c"] and not found["own_expected_fails"]


def test_each_solution_has_a_right_script_and_two_wrong_ones() -> None:
    for task, scripts in solutions().items():
        first, *others = scripts
        assert first == RIGHT and len(others) == 2 and all(x.startswith("wrong: ") for x in others), task
        for name, script in scripts.items():
            checked = subprocess.run(["sh", "-n"], input=script.encode(), capture_output=True, check=False)
            assert checked.returncode == 0, (task, name, checked.stderr)
    assert len({*solutions()} & {x.stem for x in OWN_TASKS.glob("*.json")}) == 1


def test_solutions_are_of_tasks_that_there_are() -> None:
    config = load_config()
    if config.osworld is None:
        pytest.skip("DRUMS_OSWORLD names no checkout")
    known = {x.id: x for x in (*OSWorldCatalogue(config).tasks(), *OSWorldCatalogue(HostConfig()).tasks())}
    assert {*solutions()} <= {*known}
    assert not [x for x in solutions() if known[x].needs_web or not known[x].supported]  # no desktop is made for them
    state = next(x for x in states_of(known[next(iter(solutions()))]) if x.name == "done: right")
    assert state.script and not state.files


def test_selection_leaves_out_what_it_names(tmp_path: Path) -> None:
    config = HostConfig(file_mirror=tmp_path)
    here = tmp_path / "here.xlsx"
    here.write_bytes(b"x")
    with_file = SetupStep("download", {"files": [{"url": URL.format("here.xlsx"), "path": "/home/user/a.xlsx"}]})
    without = SetupStep("download", {"files": [{"url": URL.format("gone.xlsx"), "path": "/home/user/a.xlsx"}]})
    tasks = [
        attrs.evolve(make_task(), id="plain"),
        attrs.evolve(make_task(with_file), id="file"),
        attrs.evolve(make_task(without), id="gone"),
        attrs.evolve(make_task(), id="web", needs_web=True),
    ]
    found = select(config, tasks, files_only=False)
    assert [x.id for x in found.chosen] == ["plain", "file"]
    assert found.left_out == {"this host lacks one of its files": ["gone"], "needs the live web": ["web"]}
    assert [x.id for x in select(config, tasks, files_only=True).chosen] == ["file"]


@asynccontextmanager
async def no_host(_: HostConfig) -> AsyncIterator[None]:
    """In the place of an open host: nothing is asked of it."""
    yield


@pytest.mark.parametrize("as_json", [False, True])
def test_what_was_found_is_told_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    async def compare(_: None, task: Task, *, on_line: Callable[[Line], None], **__: Any) -> None:
        await trio.lowlevel.checkpoint()  # as any real one has: what was cancelled meanwhile does not begin
        on_line(Line(task.id, "untouched", Answer(0.0), Answer(0.0), Answer(0.0)))
        signal.raise_signal(signal.SIGINT)
        await trio.sleep_forever()

    monkeypatch.delenv("DRUMS_OSWORLD", raising=False)
    monkeypatch.setattr(command, "open_host", no_host)
    monkeypatch.setattr(command, "compare_task", compare)
    options = ["--json"] if as_json else []
    result = CliRunner().invoke(command.parity, ["2e208cb7", "7a9736bf", "--jobs", "1", *options])
    assert result.exit_code == command.INTERRUPTED, result.output
    if as_json:
        assert '"interrupted": true' in result.stdout and '"reason": "interrupted before it"' in result.stdout
    else:
        assert "untouched\t0.0\t0.0\tequal" in result.stdout
        assert "1 of 2 states of 2 tasks compared, 0 differ, 1 not run" in result.stdout


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


async def scripted(host: Host) -> list[Line]:
    """A task of drums' own in all its states, with whatever `solutions` has."""
    return await compare_task(host, OSWorldCatalogue(HostConfig()).find("2e208cb7"))


async def planted(host: Host) -> list[Line]:
    """The same with scripts that do nothing, that do it under the name of a wrong one, and that fail."""
    task = OSWorldCatalogue(HostConfig()).find("2e208cb7")
    right = solutions()[task.id][RIGHT]
    scripts = {RIGHT: "true", "wrong: it is right": right, "wrong: it fails": "echo no room >&2; exit 3"}
    async with await host.create(task) as slot:
        return [
            await compare_state(slot, task, State(states.SCRIPTED + name, script=script))
            for name, script in scripts.items()
        ]


@pytest.fixture(scope="module")
def played() -> Played:
    return play({"equal": equal, "done": done, "raising": raising, "scripted": scripted, "planted": planted})


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
def test_scripts_do_and_fail_a_task(played: Played) -> None:
    found = report(played["scripted"])
    assert not found["not_run"] and not found["differences"] and not found["own_solution_fails"], found
    assert [(x["state"], x["drums"]) for x in found["lines"]] == [
        ("untouched", "0.0"),
        ("done: right", "1.0"),
        ("done: wrong: copied", "0.0"),
        ("done: wrong: another case", "0.0"),
        ("gave up", "0.0"),
    ]


@needs_desktops
def test_scripts_that_do_not_what_they_are_meant_to_are_told(played: Played) -> None:
    found = report(played["planted"])
    assert [(x["state"], x["reason"]) for x in found["own_solution_fails"]] == [
        ("done: right", "the reference gives 0.0"),
        ("done: wrong: it is right", "the reference gives 1.0"),
    ]
    (failed,) = found["not_run"]
    assert failed["state"] == "done: wrong: it fails"
    assert "its script ended with 3: no room" in failed["reason"]


@needs_desktops
def test_nothing_is_left(played: Played) -> None:
    assert played.left == []


@requires("root", "criu", "osworld")
@pytest.mark.parametrize(
    "tasks",
    [
        pytest.param(["1273e544"], id="a table"),
        pytest.param(["0e47de2a", "7dbc52a6", "030eeff7"], id="others", marks=pytest.mark.applications),
    ],
)
def test_parity_with_applications(tasks: list[str]) -> None:
    """Of a table, a text, slides and the browser's settings, in their applications, with all set-up and postconfig.

    The postconfig of the last ends the browser by the name of Chrome's process.
    """
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

    played = play({x: scenario(x) for x in tasks}, at_once=min(2, os.cpu_count() or 1))
    found = report([line for x in tasks for line in played[x]])
    assert found["compared"] == found["states"] and not found["differences"], found
    assert not found["own_solution_fails"], found
    assert played.left == []
