"""Which files a task names by URL, and those that a checker compares with, laid out for its worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import trio

from drums.errors import SetupFailed
from drums_core.config import HostConfig
from drums_core.model import Task
from drums_core.task_files.obtain import obtain
from drums_core.urls import without_credentials


def urls_of(tasks: Iterable[Task]) -> list[str]:
    """The URLs of files that tasks download, upload or compare with, each once, in their order."""
    found: dict[str, None] = {}
    for task in tasks:
        steps: list[tuple[str, Any]] = [(step.type, step.parameters) for step in task.config]
        later = task.evaluator.get("postconfig")
        steps += [(str(x.get("type")), x.get("parameters")) for x in _mappings(later)]
        for kind, parameters in steps:
            key = {"download": "files", "googledrive": "args"}.get(kind)
            if key is not None and isinstance(parameters, Mapping):
                found |= dict.fromkeys(str(x["url"]) for x in _mappings(parameters.get(key)) if "url" in x)
        found |= dict.fromkeys(compared_urls(task.evaluator))
    return list(found)


def compared_urls(evaluator: Mapping[str, Any]) -> list[str]:
    """The URLs of files that an evaluator's getters fetch from elsewhere, each once, in their order."""
    found: dict[str, None] = {}
    for key in ("result", "expected"):
        for getter in _mappings(evaluator.get(key)):
            if getter.get("type") == "cloud_file":
                path = getter.get("path")
                found |= dict.fromkeys(str(x) for x in (path if isinstance(path, list) else [path]))
    return list(found)


async def lay_out(config: HostConfig, urls: Iterable[str], folder: Path) -> dict[str, dict[str, str]]:
    """Copies of files in a folder, which is made, readable for every user.

    Returns:
        for each URL its file's name in the folder (`file`), or why it cannot be had (`cause`), with the URL as it may
        be told (`url`).
    """
    place = trio.Path(folder)
    await place.mkdir(exist_ok=True)
    await place.chmod(0o755)
    found: dict[str, dict[str, str]] = {}
    for number, url in enumerate(urls):
        try:
            content = await obtain(config, url)
        except SetupFailed as e:
            found[url] = {"cause": str(e.facts.get("cause", e.message)), "url": without_credentials(url)}
            continue
        path = place / str(number)
        await path.write_bytes(content)
        await path.chmod(0o644)
        found[url] = {"file": str(number)}
    return found


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, Mapping)]
