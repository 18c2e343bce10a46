"""Entering a context manager beside the block that needs it, so that the two take the time of the longer one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import trio

T = TypeVar("T")


@asynccontextmanager
async def ahead(manager: AbstractAsyncContextManager[T]) -> AsyncIterator[Callable[[], Awaitable[T]]]:
    """Begin to enter `manager`; the block goes on meanwhile, and gets what that gives once it asks. Left at the end.

    An error on either side cancels the other, which is waited for, and is raised as it is, in no group. Where both
    fail, the first one counts.
    """
    problems: list[Exception] = []
    entered, leave = trio.Event(), trio.Event()
    given: list[T] = []

    async def ready() -> T:
        await entered.wait()
        return given[0]

    async with trio.open_nursery() as nursery:

        async def hold() -> None:
            try:
                async with manager as value:
                    given.append(value)
                    entered.set()
                    await leave.wait()
            except Exception as e:  # noqa: BLE001 - raised below
                problems.append(e)
                nursery.cancel_scope.cancel()

        nursery.start_soon(hold)
        try:
            yield ready
        except Exception as e:  # noqa: BLE001 - raised below
            problems.append(e)
            nursery.cancel_scope.cancel()
        leave.set()
    if problems:
        raise problems[0]
