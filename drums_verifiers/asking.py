"""What checkers have in common that ask a desktop by a worker of their own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from drums.errors import CheckerError
from drums_core.abc import CheckContext
from drums_verifiers.worker import Worker, open_worker


def open_asker(
    context: CheckContext, request: Mapping[str, Any], *, job: str, timeout_s: float, files: Mapping[str, Path]
) -> AbstractAsyncContextManager[Worker]:
    """`open_worker` for a check: it can ask the desktop that is checked."""
    return open_worker(
        request,
        job=job,
        timeout_s=timeout_s,
        cgroup_paths=context.worker_cgroups,
        guest=context.serve_guest,
        files=files,
    )


async def ask_worker(context: CheckContext, worker: Worker, *, source: str) -> tuple[dict[str, Any], list[str]]:
    """What a worker answers about the desktop that is checked.

    Args:
        context: the check.
        worker: one of `open_asker`.
        source: whose answer it is, for messages.

    Returns:
        The answer, and what the worker says could not be done (`broken`): where there is any, there is no score.

    Raises:
        CheckerError: the desktop could not be asked (a request that it did not answer says nothing about it), or there
            is no such answer.
    """
    try:
        answer = await worker.answer()
    except CheckerError as e:
        refuse_unasked(context.transport_failures, e)
        raise
    refuse_unasked(context.transport_failures)
    broken = answer.get("broken")
    if "score" not in answer or not isinstance(broken, list):
        raise CheckerError(f"the worker of {source} answered {answer!r:.200}")
    return answer, [str(x) for x in broken]


def refuse_unasked(lines: list[str], cause: CheckerError | None = None) -> None:
    """Nothing, when there are no lines about requests that the desktop did not answer.

    Raises:
        CheckerError: there are.
    """
    if lines:
        raise CheckerError(f"could not ask the desktop: {lines[0]}", failures=list(lines)) from cause
