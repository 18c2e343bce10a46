"""What checkers have in common that ask a desktop by a worker of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drums.errors import CheckerError, DesktopError
from drums_core.abc import CheckContext
from drums_core.model import SetupStep
from drums_verifiers.worker import Job, Serve
from drums_verifiers.workers import Workers


async def run_postconfig(context: CheckContext, steps: Sequence[SetupStep]) -> None:
    """Carry out an evaluator's steps on the desktop that is checked, once it is there.

    Raises:
        CheckerError: one failed.
    """
    await context.wait_there()
    if not steps:
        return
    try:
        await context.run_steps(steps)
    except DesktopError as e:
        raise CheckerError(f"the evaluator's postconfig failed: {e}") from e


async def ask_worker(
    context: CheckContext,
    workers: Workers,
    request: Mapping[str, Any],
    *,
    function: str,
    source: str,
    files: Mapping[str, Path],
    ports: Mapping[int, Serve] | None = None,
    until: Callable[[], Awaitable[None]],
) -> tuple[dict[str, Any], list[str]]:
    """What a worker answers about the desktop that is checked, which it can ask.

    Args:
        context: the check.
        workers: those of the checker.
        request, function, files, ports, until: as for `Job`.
        source: whose answer it is, for messages.

    Returns:
        The answer, and what the worker says could not be done (`broken`): where there is any, there is no score.

    Raises:
        CheckerError: the desktop could not be asked (a request that it did not answer says nothing about it), or there
            is no such answer.
    """
    try:
        answer = await workers.run(Job(request, function, context.serve_guest, files, ports or {}, until))
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
