"""The task catalogue and the rule for unsupported tasks, on the real checkout where there is one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pluggy
import pytest
from requires import osworld_checkout

from drums.errors import ConfigError, TaskAmbiguous, TaskNotFound
from drums_core import hookspecs
from drums_core.abc import Step
from drums_core.config import HostConfig
from drums_core.image.recipe import load_recipe
from drums_core.image.software import Software, recipe_with
from drums_core.model import SetupStep, Task
from drums_core.plugins import build_manager
from drums_core.setup import parse_steps
from drums_osworld import osworld_catalogue, osworld_checker
from drums_osworld.applications import needed_applications
from drums_osworld.catalogue import OWN_TASKS, OSWorldCatalogue
from drums_osworld.checker import OSWorldChecker, postconfig
from drums_osworld.steps.execute import Execute
from drums_osworld.steps.launch import Launch
from drums_osworld.steps.sleep import Sleep
from drums_osworld.support import unsupported_reason
from drums_osworld.task_file import structure_steps

NEED_ROOT = {
    "5812b315-e7bd-4265-b51f-863c02174c28",
    "94d95f96-9699-4208-98ba-3c3119edf9c2",
    "b6781586-6346-41cd-935a-a6b1487918fc",
}


@pytest.fixture
def checkout() -> Path:
    return osworld_checkout()


def test_all_tasks_of_the_checkout(checkout: Path) -> None:
    catalogue = OSWorldCatalogue(HostConfig(osworld=checkout))
    tasks = catalogue.tasks()
    assert (len(tasks), catalogue.broken) == (369, {})
    listed = json.loads((checkout / "evaluation_examples" / "test_all.json").read_text())
    assert [(x.domain, x.id) for x in tasks] == [(domain, x) for domain, ids in listed.items() for x in ids]
    assert {x.id for x in tasks if not x.supported} == NEED_ROOT
    assert all(bool(x.unsupported_reason) != x.supported for x in tasks)


def test_every_step_of_every_task_is_known(checkout: Path) -> None:
    registry = build_manager().registry
    for task in OSWorldCatalogue(HostConfig(osworld=checkout)).tasks():
        parse_steps(registry, task.config, "config")
        parse_steps(registry, structure_steps(task.evaluator.get("postconfig", []), "postconfig"), "postconfig")


def test_what_each_image_is_enough_for(checkout: Path) -> None:
    """`osworld` for all but those about an editor that only its vendor has, or with that one; live web apart.

    The last number is that of the README: what can be done in the image as it comes, by one who is not root.
    """
    tasks = OSWorldCatalogue(HostConfig(osworld=checkout)).tasks()
    vendors = Software("osworld", "deb [signed-by=/k.asc] https://vendor.example stable main", ("code",))
    held = {name: {*load_recipe(name).applications} for name in ("minimal", "osworld")}
    held["with code"] = {*recipe_with("osworld", [vendors]).applications}
    lacking = {name: [x for x in tasks if not {*x.applications} <= held[name]] for name in held}
    assert {application for x in lacking["osworld"] for application in x.applications} - held["osworld"] == {"code"}
    assert len(lacking["osworld"]) == 35 and len(lacking["minimal"]) == 348 and lacking["with code"] == []
    assert sum({*x.applications} <= held["osworld"] and x.supported and not x.needs_web for x in tasks) == 260


@pytest.mark.parametrize(
    ("config", "evaluator", "related", "applications"),
    [
        ([("launch", {"command": "VLC_VERBOSE=-1 vlc --x", "shell": True})], {}, ["os"], ("vlc",)),
        ([("launch", {"command": ["/usr/bin/thunderbird"]})], {}, [], ("thunderbird",)),
        ([("open", {"path": "/home/user/A.XLSX"})], {}, [], ("libreoffice",)),
        ([], {}, ["vs_code", "libreoffice calc", "Chrome"], ("code", "google-chrome", "libreoffice")),
        ([], {"postconfig": [{"type": "launch", "parameters": {"command": ["pkill", "vlc"]}}]}, [], ()),
        ([], {"result": {"type": "vm_command_line", "command": "gsettings get x"}}, [], ("gsettings",)),
        ([], {"result": {"type": "vm_terminal_output"}}, [], ("gnome-terminal",)),
    ],
)
def test_rule_for_applications(
    config: list[tuple[str, dict[str, Any]]],
    evaluator: dict[str, Any],
    related: list[str],
    applications: tuple[str, ...],
) -> None:
    steps = [SetupStep(*step) for step in config]
    assert needed_applications(steps, evaluator, related) == applications


def test_every_task_names_what_the_package_defines(checkout: Path) -> None:
    config = HostConfig(osworld=checkout)
    checker = OSWorldChecker(config)
    for task in OSWorldCatalogue(config).tasks():
        assert checker.claims(task.evaluator)
        checker.validate(task)


def test_every_step_of_a_known_type_is_understood(checkout: Path) -> None:
    steps: dict[str, Step] = {"execute": Execute(), "command": Execute("command"), "launch": Launch(), "sleep": Sleep()}
    parsed = 0
    for task in OSWorldCatalogue(HostConfig(osworld=checkout)).tasks():
        for step in (*task.config, *postconfig(task)):
            if step.type in steps:
                steps[step.type].parse(step.parameters)
                parsed += 1
    assert parsed > 900


def test_task_is_found_by_id_and_prefix(checkout: Path) -> None:
    catalogue = OSWorldCatalogue(HostConfig(osworld=checkout))
    task = catalogue.find("e0df059f")
    assert task is catalogue.find("e0df059f-28a6-4169-924f-b9623e7184cc")
    assert (task.domain, task.supported, len(task.config)) == ("os", True, 2)
    path = checkout / "evaluation_examples" / "examples" / "os" / f"{task.id}.json"
    assert task.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(TaskNotFound, match="8 or more"):
        catalogue.find("e0df059")
    with pytest.raises(TaskNotFound, match="nearest: e0df059f") as info:
        catalogue.find("e0df0599")
    assert info.value.candidates == [task.id]
    for prefix in ("", "no such task at all"):
        with pytest.raises(TaskNotFound):
            catalogue.find(prefix)


def test_own_tasks_are_served_without_a_checkout() -> None:
    catalogue = OSWorldCatalogue(HostConfig())
    tasks = catalogue.tasks()
    assert len(tasks) == len(list(OWN_TASKS.glob("*.json"))) == 2 and not catalogue.broken
    assert all(x.supported and x.domain == "os" for x in tasks)
    rename = catalogue.find("2e208cb7")
    assert rename.evaluator["func"] == "exact_match"
    for task in tasks:
        OSWorldChecker(HostConfig()).validate(task)


def write(root: Path, files: dict[str, Any], listed: list[str] | None = None) -> OSWorldCatalogue:
    folder = root / "evaluation_examples" / "examples" / "os"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    (root / "evaluation_examples" / "test_all.json").write_text(json.dumps({"os": listed or list(files)}))
    return OSWorldCatalogue(HostConfig(osworld=root))


def good(task_id: str) -> dict[str, Any]:
    return {"id": task_id, "instruction": "do", "evaluator": {"func": "infeasible"}, "unknown": 1}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "cannot be read"),
        ([], r"expected an object @ \$"),
        ({"id": "bad-task", "evaluator": {"func": "x"}}, r"required field missing @ \$\.instruction"),
        (good("bad-task") | {"id": 5}, r"expected a string, found 5 @ \$\.id"),
        (good("another1"), r"id is 'another1'.* @ \$\.id"),
        (good("bad-task") | {"evaluator": []}, r"@ \$\.evaluator"),
        (good("bad-task") | {"evaluator": {}}, r"@ \$\.evaluator\.func"),
        (good("bad-task") | {"config": [{"parameters": {}}]}, r"@ \$\.config"),
        (good("bad-task") | {"config": [{"type": "x", "parameters": []}]}, r"@ \$\.config"),
    ],
)
def test_broken_task_file_is_listed_and_the_others_served(tmp_path: Path, content: Any, fault: str) -> None:
    catalogue = write(tmp_path, {"bad-task": content, "good-task": good("good-task")}, None)
    assert [x.id for x in catalogue.tasks()] == ["good-task"]
    assert [x.name for x in catalogue.broken] == ["bad-task.json"]
    with pytest.raises(ConfigError, match=fault):
        catalogue.find("bad-task")


def test_missing_file_is_broken_and_ambiguous_prefix_is_refused(tmp_path: Path) -> None:
    names = ["12345678-a", "12345678-b", "12345678-gone"]
    catalogue = write(tmp_path, {x: good(x) for x in names[:2]}, names)
    assert [x.id for x in catalogue.tasks()] == names[:2]
    assert [x.name for x in catalogue.broken] == ["12345678-gone.json"]
    with pytest.raises(TaskAmbiguous, match="3 tasks begin with '12345678'") as info:
        catalogue.find("12345678")
    assert (info.value.status, info.value.candidates) == (409, names)
    assert catalogue.find("12345678-a").id == "12345678-a"


@pytest.mark.parametrize("text", [None, "[]", "{", '{"os": ["../../etc/passwd"]}', '{"os": "x"}'])
def test_wrong_task_list_is_a_configuration_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "evaluation_examples").mkdir()
        (tmp_path / "evaluation_examples" / "test_all.json").write_text(text)
    with pytest.raises(ConfigError, match="task list"):
        OSWorldCatalogue(HostConfig(osworld=tmp_path)).tasks()


def reads(command: str | list[str], **rules: Any) -> dict[str, Any]:
    return {
        "func": "check_include_exclude",
        "result": {"type": "vm_command_line", "command": command},
        "expected": {"type": "rule", "rules": rules},
    }


@pytest.mark.parametrize(
    ("evaluator", "needs_root"),
    [
        (reads("which spotify"), True),
        (reads("which python3"), False),
        (reads(["bash", "-c", "command -v htop"]), True),
        (reads("timedatectl status"), True),
        (reads("getent passwd bob"), True),
        (reads("systemctl is-active cups"), True),
        (reads("systemctl --user is-active x"), False),
        (reads("cat /etc/motd"), True),
        (reads("cat ~/etc/motd; ls /home/user/usr/x"), False),
        (reads("/usr/bin/python3 ~/x.py"), False),
        (reads("apt list --installed", expect=["openjdk-\\d+-(jre|jdk)"]), False),
        (reads("apt list --installed", expect=["openjdk-\\d+-(jre|jdk)", "spotify"]), True),
        (reads("dpkg -l", include=["git"]), True),
        (reads("timedatectl") | {"func": "infeasible"}, False),
        ({"func": "exact_match", "result": {"type": "vm_file", "path": "/etc/hosts", "dest": "x"}}, True),
        ({"func": "exact_match", "result": {"type": "vm_file", "path": "/home/user/x", "dest": "x"}}, False),
    ],
)
def test_rule_for_root(evaluator: dict[str, Any], needs_root: bool) -> None:
    assert bool(unsupported_reason(evaluator)) is needs_root


def test_rule_sees_what_a_postconfig_leaves_for_the_checker() -> None:
    step = {"type": "execute", "parameters": {"command": ["snap", "list"], "stdout": "snap.out"}}
    evaluator = {"func": "check_list", "postconfig": [step], "result": {"type": "cache_file", "path": "snap.out"}}
    assert "package database" in unsupported_reason(evaluator)
    assert unsupported_reason({**evaluator, "result": {"type": "cache_file", "path": "other"}}) == ""


def test_task_is_frozen() -> None:
    task = OSWorldCatalogue(HostConfig()).tasks()[0]
    assert isinstance(task, Task)
    with pytest.raises(AttributeError):
        task.id = "x"  # type: ignore[misc]


def test_plugins_register_checker_and_catalogue() -> None:
    manager = pluggy.PluginManager("drums")
    manager.add_hookspecs(hookspecs)
    manager.register(osworld_checker)
    manager.register(osworld_catalogue)
    made: dict[str, Any] = {}

    def register(name: str, factory: Any) -> None:
        made[name] = type(factory(HostConfig()))

    manager.hook.drums_register_checkers(register=register)
    manager.hook.drums_register_catalogues(register=register)
    manager.check_pending()
    assert made == {"osworld_checker": OSWorldChecker, "osworld_catalogue": OSWorldCatalogue}
