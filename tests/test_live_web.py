"""Which tasks need the live web: the rule, the list, and both held against the checkout's 369."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from requires import osworld_checkout

from drums.errors import ConfigError
from drums_core.config import HostConfig
from drums_core.daemon.routes import task_document
from drums_core.model import SetupStep, Task
from drums_osworld.catalogue import OSWorldCatalogue
from drums_osworld.live_web import listed, needs_web, tells_of_web
from drums_osworld.task_file import read_task

EXTENSIONS = {"type": "vm_command_line", "command": ["code", "--list-extensions", "|", "grep", "x"]}
# Whose documents tell by a URL in the instruction and by nothing else. Each was read: its agent has to go there.
BY_INSTRUCTION = {"3c8f201a", "69acbb55", "788b3701", "aad10cd7", "acb0f96b", "bba3381f", "da52d699"}
# What could seem to need it, and was read: without the web an agent can do it, by what it knows or what is there.
WITHOUT = {"15c3b339", "3299584d", "44ee5668", "6f4073b8", "7e287123", "9b7bc335", "b337d106", "ce2b64a2", "dfac9ee8"}


@pytest.fixture(scope="module")
def tasks() -> Sequence[Task]:
    return OSWorldCatalogue(HostConfig(osworld=osworld_checkout())).tasks()


@pytest.mark.parametrize(
    ("instruction", "config", "evaluator", "web"),
    [
        ("", [("chrome_open_tabs", {"urls_to_open": ["https://a.example"]})], {}, True),
        ("", [("chrome_open_tabs", {"urls_to_open": ["a.example"]})], {}, True),
        ("", [("chrome_open_tabs", {"urls_to_open": ["file:///x", "http://localhost:80"]})], {}, False),
        ("", [("login", {})], {}, True),
        ("", [], {"result": {"type": "page_info"}}, True),
        ("", [], {"result": EXTENSIONS}, True),
        ("", [("download", {"files": [{"url": "x", "path": "a.vsix"}]})], {"result": EXTENSIONS}, False),
        ("", [("download", {"files": [{"url": "https://a.example/x", "path": "/x"}]})], {}, False),
        ('Clone "https://a.example/x".', [], {}, True),
        ("Write down what http://127.0.0.1:8000/x says, and file:///x", [], {}, False),
        ("It always opens funbrain.com, and mail goes to a@b.example.", [], {}, False),
    ],
)
def test_rule(instruction: str, config: list[tuple[str, dict[str, Any]]], evaluator: dict[str, Any], web: bool) -> None:
    steps = [SetupStep(*step) for step in config]
    assert tells_of_web(instruction, steps, evaluator) is web
    assert needs_web("no-listed-task", instruction, steps, evaluator) is web


def faults(found: Mapping[str, Any], tasks: Sequence[Task]) -> list[str]:
    """What is wrong with a list of tasks that no rule finds."""
    known = {x.id: x for x in tasks}
    wrong = []
    for identity, reason in found.items():
        task = known.get(identity)
        if task is None:
            wrong.append(f"{identity}: no task")
        elif not task.supported:
            wrong.append(f"{identity}: refused anyway: {task.unsupported_reason}")
        elif tells_of_web(task.instruction, task.config, task.evaluator):
            wrong.append(f"{identity}: the rule finds it")
        elif task.evaluator["func"] == "infeasible":
            wrong.append(f"{identity}: what is right is to say that it cannot be done")
        if not isinstance(reason, str) or not re.fullmatch(r"[^.;\n]{10,80}", reason):
            wrong.append(f"{identity}: no phrase: {reason!r}")
    return wrong if list(found) == sorted(found) else [*wrong, "not in order"]


def test_list_holds_against_the_checkout(tasks: Sequence[Task]) -> None:
    assert faults(listed(), tasks) == [] and len(listed()) == 12
    assert all(x.needs_web for x in tasks if x.id in listed())


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ({"00000000-0000": "a page is to be open"}, "no task"),
        ({"acb0f96b-e27c-44d8-b55f-7cb76609dfcd": "a page is to be open"}, "the rule finds it"),
        ({"94d95f96-9699-4208-98ba-3c3119edf9c2": "a page is to be open"}, "refused anyway"),
        ({"b3d4a89c-53f2-4d6b-8b6a-541fb5d205fa": "a page is to be open"}, "cannot be done"),
        ({"48d05431-6cd5-4e76-82eb-12b60d823f7d": ""}, "no phrase"),
        ({"48d05431-6cd5-4e76-82eb-12b60d823f7d": "a page.", "36037439-2044-4b50-b9d1-875b5a332143": "x"}, "in order"),
    ],
)
def test_fault_in_the_list_is_seen(planted: dict[str, str], fault: str, tasks: Sequence[Task]) -> None:
    assert any(fault in x for x in faults(planted, tasks))


def test_which_tasks_need_it(tasks: Sequence[Task]) -> None:
    """Docs and README have these numbers; each task that tells by its instruction alone was read."""
    web = {x.id[:8] for x in tasks if x.needs_web}
    alone = {x.id[:8] for x in tasks if x.needs_web and not tells_of_web("", x.config, x.evaluator)}
    assert len(web) == 77 and alone == BY_INSTRUCTION | {x[:8] for x in listed()}
    assert not web & WITHOUT and {x.id[:8] for x in tasks} >= WITHOUT
    assert not [x.id for x in tasks if x.needs_web and x.evaluator["func"] == "infeasible"]


def test_a_proxy_that_is_not_applied_is_told(tasks: Sequence[Task]) -> None:
    """With the reason, of each task that asks for one."""
    told = {x.id[:8]: x for x in tasks if x.remarks}
    assert {x.remarks for x in told.values()} == {("`proxy: true` is not applied: desktops have no network",)}
    assert len(told) == 52 and [x for x, task in told.items() if not task.needs_web] == ["44ee5668"]
    [document] = [task_document(x, ()) for x in told.values() if not x.needs_web]
    assert document["remarks"] == ["`proxy: true` is not applied: desktops have no network"]


@pytest.mark.parametrize(("proxy", "remarks"), [({}, 0), ({"proxy": False}, 0), ({"proxy": True}, 1)])
def test_remark_is_of_tasks_that_ask_for_a_proxy(proxy: dict[str, bool], remarks: int, tmp_path: Path) -> None:
    assert len(read(tmp_path, **proxy).remarks) == remarks


@pytest.mark.parametrize("instruction", ["Open https://a.example/x", "Rename the folder"])
@pytest.mark.parametrize("said", [True, False])
def test_a_task_may_say_so_itself(said: bool, instruction: str, tmp_path: Path) -> None:
    """An operator's own task, of which the rule knows less than who wrote it."""
    assert read(tmp_path, instruction=instruction, needs_web=said).needs_web is said
    assert read(tmp_path, instruction=instruction).needs_web is ("https" in instruction)


@pytest.mark.parametrize("said", ["no", 0, None])
def test_a_task_says_it_by_true_or_false(said: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected true or false, found .* @ \$\.needs_web"):
        read(tmp_path, needs_web=said)


def read(folder: Path, **fields: object) -> Task:
    file = folder / "x.json"
    file.write_text(json.dumps({"id": "x", "instruction": "", "evaluator": {"func": "infeasible"}, **fields}))
    return read_task(file, domain="os", expected_id="x")


def test_a_listed_task_is_told_by_its_id_alone(tasks: Sequence[Task]) -> None:
    """The rule stays without the list, and another task with the same document is not one."""
    task = next(x for x in tasks if x.id in listed())
    for identity, web in ((task.id, True), ("another", False)):
        other = attrs.evolve(task, id=identity)
        assert needs_web(other.id, other.instruction, other.config, other.evaluator) is web
