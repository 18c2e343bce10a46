"""The little that an asynchronous client needs of whichever event loop runs: trio, or asyncio and what builds on it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any


def _trio() -> Any:
    """trio when it is what runs here; it is not imported for that."""
    trio: Any = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_run() else None


async def sleep(seconds: float) -> None:
    """Wait, on whichever loop runs."""
    trio = _trio()
    await (trio.sleep(seconds) if trio is not None else asyncio.sleep(seconds))


async def finish(work: Callable[[], Awaitable[None]], limit_s: float) -> None:
    """Do `work` to its end although the caller may be cancelled, but no longer than `limit_s`.

    Cancellation: put off until the work is done.
    Raises:
        TimeoutError: the limit came first.
    """
    trio = _trio()
    if trio is not None:
        with trio.CancelScope(deadline=trio.current_time() + limit_s, shield=True) as scope:
            await work()
        if scope.cancelled_caught:
            raise TimeoutError(f"not done within {limit_s:g} s")
        return
    # A task of its own: a cancellation of the caller, even one that keeps coming, does not reach it.
    task = asyncio.ensure_future(asyncio.wait_for(work(), limit_s))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None:
        task.exception()  # asked for, so that asyncio does not complain of it later
        raise cancelled
    task.result()
