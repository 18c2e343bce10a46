"""Scripts that do tasks, and that do them wrong: for tasks whose right result is no file that OSWorld ships.

They are in `solutions.toml`: for a task's id, scripts by name, `right` and some that begin with `wrong: `.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

_FILE = Path(__file__).with_name("solutions.toml")


@functools.cache
def solutions() -> Mapping[str, Mapping[str, str]]:
    """The scripts of each task, whole, by their names."""
    document = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    functions = document.pop("functions")
    return {task: {name: functions + script for name, script in scripts.items()} for task, scripts in document.items()}
