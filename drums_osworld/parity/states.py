"""The states that a task is scored in: derived by rule from its evaluator, and made by scripts (`solutions.toml`).

- `untouched`: the task set up, and nothing done;
- `right`: the expected files where the results are looked for;
- `wrong: the input as the result`: the first file of the set-up under each result's name, where results are new files;
- `wrong: another task's file as the result`: where they are the set-up's own files, which untouched are that input;
- `wrong: an empty file as the result`: no bytes under each result's name, as a program leaves that broke off;
- `done: ...`: what a script did, `right` or `wrong: ...`, where the solution is no file;
- `gave up`: the agent's last action was FAIL, which for `infeasible` is the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from drums_core.model import Task
from drums_osworld.parity.solutions import solutions
from drums_osworld.symbols import named


@attrs.frozen
class State:
    """What is done to a desktop after its task was set up.

    Args:
        name: for reports.
        files: path in the desktop -> URL of the file that is put there, None for one without content.
        script: what the desktop's user has /bin/sh do.
        gave_up: whether the agent says FAIL.
    """

    name: str
    files: Mapping[str, str | None] = attrs.field(factory=dict)
    script: str = ""
    gave_up: bool = False


UNTOUCHED = "untouched"
RIGHT = "right"
SCRIPTED = "done: "


def states_of(task: Task, others: Sequence[str] = ()) -> list[State]:
    """The states of a task; the first is `untouched`.

    Args:
        others: URLs of files of any task; one with the result's ending that is not this task's own stands for a wrong
            result.
    """
    found = [State(UNTOUCHED)]
    results = _paths(task.evaluator.get("result"), "vm_file")
    expected = [url for url in _paths(task.evaluator.get("expected"), "cloud_file") if url]
    inputs = downloads(task.config)
    # What a postconfig downloads for the comparison is the expected file of a task that reads it from the desktop.
    later = [x for x in named(task.evaluator.get("postconfig") or []) if x.get("type") == "download"]
    expected = expected or [file["url"] for x in later for file in x["parameters"]["files"]]
    if results and expected:
        found.append(State(RIGHT, dict(zip(results, expected, strict=False))))
    own = {*expected, *inputs.values()}
    strange = [x for x in others if results and x not in own and _ending(x) == _ending(results[0])]
    if results and set(results) & set(inputs) and strange:
        found.append(State("wrong: another task's file as the result", dict.fromkeys(results, strange[0])))
    elif results and inputs:
        found.append(State("wrong: the input as the result", dict.fromkeys(results, next(iter(inputs.values())))))
    if results:
        found.append(State("wrong: an empty file as the result", dict.fromkeys(results)))
    found += [State(SCRIPTED + name, script=script) for name, script in solutions().get(task.id, {}).items()]
    found.append(State("gave up", gave_up=True))
    return found


def downloads(config: Sequence[Any]) -> dict[str, str]:
    """Path in the desktop -> URL of what set-up steps download."""
    return {
        str(file["path"]): str(file["url"])
        for step in config
        if step.type == "download"
        for file in step.parameters.get("files", [])
    }


def _ending(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _paths(getters: Any, kind: str) -> list[str]:
    """The paths that getters of this type name, in their order, each once."""
    found: dict[str, None] = {}
    for getter in named(getters or []):
        if isinstance(getter, Mapping) and getter.get("type") == kind:
            found |= dict.fromkeys(str(x) for x in named(getter.get("path")))
    return list(found)


def without_applications(task: Task) -> Task:
    """The task as far as files go: only `download` steps, no postconfig, no application needed.

    Raises:
        ValueError: its checker looks at more than files; says at what.
    """
    kinds = {x.get("type") for key in ("result", "expected") for x in named(task.evaluator.get(key) or []) if x}
    if other := sorted(str(x) for x in kinds - {"vm_file", "cloud_file", "rule"}):
        raise ValueError(f"its checker reads {', '.join(other)}, which needs its applications")
    evaluator = {key: value for key, value in task.evaluator.items() if key != "postconfig"}
    config = tuple(step for step in task.config if step.type == "download")
    return attrs.evolve(task, config=config, evaluator=evaluator, applications=())
