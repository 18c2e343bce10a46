"""What a check that ends in an error says: the errors themselves, whatever group they come in."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from desktops import make_task
from requires import requires

from drums.errors import CheckerError, GuestError
from drums_core.copies import Copy
from drums_core.end_states import EndState
from drums_core.host import Host
from drums_core.model import Cause
from drums_core.slot import Slot
from drums_core.verifying import Failure, _Asking, _Check

pytestmark = requires("root")


async def attempted(check: Callable[[Any], Awaitable[float]]) -> Failure:
    """Why a checker that does this gives no score."""
    checker = SimpleNamespace(claims=lambda _: True, check=check)
    config = SimpleNamespace(checker_timeout_s=5)
    host = cast(Host, SimpleNamespace(checkers={"planted": (checker, None)}, config=config))
    task = make_task()
    state = EndState(slot="s", episode="e", last_action=None, acted=True, outputs={})
    score, failure = await _Check(task, state, None, kept=False).attempt(host, nullcontext(cast(Slot, None)))
    assert score is None and failure is not None
    return failure


def raising(*errors: Exception, deep: bool = False) -> Callable[[Any], Awaitable[float]]:
    """A checker whose tasks all raise, in a nursery, or in one within another."""

    async def one(error: Exception, all_there: trio.Event) -> None:
        with trio.CancelScope(shield=True):
            await all_there.wait()
        raise error

    async def check(context: Any) -> float:
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            all_there = trio.Event()
            for number, error in enumerate(errors):
                (outer if deep and number % 2 else inner).start_soon(one, error, all_there)
            all_there.set()
        return 1.0

    return check


BLAMED = CheckerError("the desktop lied", cause=Cause.AGENT, evidence=["a line"])


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [
        ([ValueError("planted")], Failure("ValueError: planted")),
        ([BLAMED], Failure("the desktop lied", Cause.AGENT, ["a line"])),
        ([GuestError("no answer")], Failure("GuestError: no answer")),
        ([BLAMED, CheckerError("the worker died")], Failure("", Cause.AGENT, ["a line"])),
        ([BLAMED, CheckerError("x", cause=Cause.INFRASTRUCTURE)], Failure("", None, ["a line"])),
        ([ValueError("one"), OSError(24, "two"), BLAMED], Failure("", Cause.AGENT, ["a line"])),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
async def test_errors_in_a_group_are_named(errors: list[Exception], wanted: Failure, deep: bool) -> None:
    found = await attempted(raising(*errors, deep=deep))
    assert (found.cause, found.evidence) == (wanted.cause, wanted.evidence)
    assert found.message == wanted.message or len(errors) > 1
    for error in errors:
        name = "" if isinstance(error, CheckerError) else f"{type(error).__name__}: "
        assert f"{name}{error}" in found.message
    assert "Group" not in found.message and "nursery" not in found.message


async def test_an_error_in_no_group_is_named() -> None:
    async def check(context: Any) -> float:
        raise BLAMED

    assert await attempted(check) == Failure("the desktop lied", Cause.AGENT, ["a line"])


async def test_what_hid_the_desktop_comes_first() -> None:
    """The desktop could not be reached: that is told, not what it made of the worker, in a group or not."""

    async def check(context: Any) -> float:
        context.serve_guest.__self__._faults.append(CheckerError("the copy could not be frozen"))
        return await raising(CheckerError("the worker lost its way"))(context)

    assert (await attempted(check)).message == "the copy could not be frozen"


async def test_a_copy_that_cannot_be_frozen_leaves_no_listener_open() -> None:
    """The worker's socket is handed over before the copy is frozen: who cannot serve it closes it."""
    fault = CheckerError("planted: the copy could not be frozen")

    class Unfreezable(Copy):
        """A copy."""

        def __init__(self) -> None:
            pass

        @asynccontextmanager
        async def frozen(self) -> AsyncIterator[None]:
            """Not this one."""
            raise fault
            yield

    with socket.create_server(("127.0.0.1", 0)) as server:
        fd = server.detach()
    asking = _Asking(Path("/none"), Unfreezable())
    with pytest.raises(CheckerError, match="planted"):
        await asking.serve(fd)
    assert asking._faults == [fault]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
