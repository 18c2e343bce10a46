"""The tasks that a host serves: those of an OSWorld checkout, or the few that come with drums."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from drums.errors import ConfigError, TaskAmbiguous, TaskNotFound
from drums_core.config import HostConfig
from drums_core.model import Task
from drums_osworld.task_file import read_task

SHORTEST_PREFIX = 8
OWN_TASKS = Path(__file__).with_name("tasks")


class OSWorldCatalogue:
    """OSWorld's tasks, read when they are first asked for.

    A task file that is wrong is left out and listed in `broken`; the others are served.

    Args:
        config: with `osworld`, the tasks of that checkout's `test_all.json`; without, drums' own.
    """

    def __init__(self, config: HostConfig) -> None:
        self._osworld = config.osworld
        self._index: Mapping[str, tuple[Path, str]] | None = None
        self._read: dict[str, Task] = {}
        self.broken: dict[Path, str] = {}

    def tasks(self) -> Sequence[Task]:
        """All tasks that can be read, in the order of the list."""
        found = []
        for task_id in self._files():
            try:
                found.append(self._task(task_id))
            except ConfigError:
                continue  # it is in `broken`
        return found

    def find(self, prefix: str) -> Task:
        """The task with this id, or this unique prefix of it of 8 characters or more.

        Raises:
            TaskNotFound: none; `.candidates` has the nearest ids.
            TaskAmbiguous: several; `.candidates` has those that begin so.
            ConfigError: its file is wrong.
        """
        files = self._files()
        if prefix in files:
            return self._task(prefix)
        matching = [x for x in files if x.startswith(prefix)] if prefix else []
        if len(prefix) < SHORTEST_PREFIX:
            raise TaskNotFound(
                f"{prefix!r} has {len(prefix)} characters; a task's prefix needs {SHORTEST_PREFIX} or more",
                candidates=matching[:10],
            )
        if len(matching) == 1:
            return self._task(matching[0])
        if matching:
            raise TaskAmbiguous(
                f"{len(matching)} tasks begin with {prefix!r}: give more of the id",
                hint=f"they are {', '.join(matching[:5])}",
                candidates=matching[:10],
            )
        near = difflib.get_close_matches(prefix, [*files, *(x[: len(prefix)] for x in files)], n=3)
        candidates = [next(y for y in files if y.startswith(x)) for x in near]
        raise TaskNotFound(
            f"no task has the id or prefix {prefix!r}",
            hint=f"nearest: {', '.join(dict.fromkeys(candidates))}" if candidates else "",
            candidates=list(dict.fromkeys(candidates)),
        )

    def _task(self, task_id: str) -> Task:
        if task_id not in self._read:
            path, domain = self._files()[task_id]
            try:
                self._read[task_id] = read_task(path, domain=domain, expected_id=task_id)
            except ConfigError as e:
                self.broken[path] = e.message
                raise
        return self._read[task_id]

    def _files(self) -> Mapping[str, tuple[Path, str]]:
        if self._index is None:
            self._index = _own() if self._osworld is None else _checkout(self._osworld)
        return self._index


def _own() -> dict[str, tuple[Path, str]]:
    return {x.stem: (x, "os") for x in sorted(OWN_TASKS.glob("*.json"))}


def _checkout(osworld: Path) -> dict[str, tuple[Path, str]]:
    path = osworld / "evaluation_examples" / "test_all.json"
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"OSWorld's task list {str(path)!r} cannot be read: {e}",
            hint="DRUMS_OSWORLD must name the folder that holds evaluation_examples",
            path=str(path),
        ) from e
    if not isinstance(document, dict) or not all(
        isinstance(ids, list) and all(isinstance(x, str) and "/" not in x for x in ids) for ids in document.values()
    ):
        raise ConfigError(f"OSWorld's task list {str(path)!r} is not an object of lists of ids", path=str(path))
    examples = path.parent / "examples"
    return {x: (examples / domain / f"{x}.json", domain) for domain, ids in document.items() for x in ids}
