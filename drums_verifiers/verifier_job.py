"""The job of a verifier's worker: calls an operator's function on a view of the desktop, inside the sandbox.

Standard library and the view alone.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Awaitable, Generator
from typing import Any

from drums_verifiers.desktop_view import BROKEN, Desktop, DesktopUnreachable

_EVIDENCE_LIMIT = 64 << 10


def _plain(value: Any) -> Any:
    """What JSON can carry of a score; numpy's scalars have `item`. The host judges it."""
    item = getattr(value, "item", None)
    value = item() if callable(item) else value
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)[:200]


def _remark(value: Any) -> Any:
    """Evidence or notes, as far as JSON can carry them."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        value = repr(value)[:_EVIDENCE_LIMIT]
        text = json.dumps(value)
    return value if len(text) <= _EVIDENCE_LIMIT else f"{text[:_EVIDENCE_LIMIT]}… (cut: {len(text)} characters)"


async def _finish(value: Awaitable[Any]) -> Any:
    return await value


def call(function: Any, desktop: Any, task: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Call a verifier's function and, where it is async, run it to its end.

    Returns:
        `score` as it was returned, and `evidence` and `notes` where they were given, as far as JSON can carry them.
    """
    value = function(desktop, task, **options)
    if inspect.isawaitable(value):
        value = asyncio.run(_finish(value))
    answer = {"score": _plain(getattr(value, "score", value))}
    for name in ("evidence", "notes"):
        if getattr(value, name, None) is not None:
            answer[name] = _remark(getattr(value, name))
    return answer


def find(module: str, attribute: str, function: str) -> Any:
    """A verifier's function; of a class, a method of a new object of it.

    Args:
        attribute: dotted, or empty.
    """
    target: Any = importlib.import_module(module)
    for part in filter(None, attribute.split(".")):
        target = getattr(target, part)
    if isinstance(target, type):
        target = target()
    return getattr(target, function)


def run(request: dict[str, Any]) -> Generator[None, None, dict[str, Any]]:
    """Call a verifier; its module is imported before there is a desktop to ask.

    Args:
        request: `module`, `attribute` (dotted, or empty), `function`, `options`, `task`, `last_action`, and `path`:
            folders to look for modules in before the others.

    Returns:
        `score` as it was returned, `broken`, and `evidence` and `notes` where they were given.
    """
    # Before what is installed: the episode may have begun with another version of it.
    sys.path[:0] = request["path"]
    answer: dict[str, Any] = {"score": None}
    try:
        function = find(request["module"], request["attribute"], request["function"])
        yield
        answer |= call(function, Desktop(request["last_action"]), request["task"], request["options"])
    except DesktopUnreachable:
        pass  # it is in BROKEN
    return {**answer, "broken": BROKEN[:20]}
