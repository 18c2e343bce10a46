"""Which tasks are compared when none is named: those that this host can set up and score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from drums_core.config import HostConfig
from drums_core.model import Task
from drums_core.task_files.obtain import have
from drums_osworld.files import urls_of


@attrs.frozen
class Selection:
    """Tasks by whether they are compared.

    Args:
        chosen: those that are; what cannot be created of them is told as a problem.
        left_out: why the others are not -> their ids.
    """

    chosen: Sequence[Task]
    left_out: Mapping[str, Sequence[str]]


def select(config: HostConfig, tasks: Sequence[Task], *, files_only: bool) -> Selection:
    """The tasks that need no live web and no file that this host lacks.

    Args:
        files_only: those that name no file are left out, too.
    """
    chosen: list[Task] = []
    left_out: dict[str, list[str]] = {}
    for task in tasks:
        reason = _left_out(config, task, files_only)
        if reason:
            left_out.setdefault(reason, []).append(task.id)
        else:
            chosen.append(task)
    return Selection(chosen, left_out)


def _left_out(config: HostConfig, task: Task, files_only: bool) -> str:
    """Why a task is not compared, "" when it is."""
    if task.needs_web:
        return "needs the live web"
    if files_only and not urls_of([task]):
        return "names no file"
    return "" if has_files(config, task) else "this host lacks one of its files"


def has_files(config: HostConfig, task: Task) -> bool:
    """Whether this host has all files that a task names."""
    return all(have(config, url) for url in urls_of([task]))
