"""What a check that ends in an error says: the errors themselves, whatever group they come in."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
import trio
import trio.testing
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


Check = Callable[[Any], Awaitable[float]]


async def tried(
    check: Check,
    opening: AbstractAsyncContextManager[Any] | None = None,
    *,
    limit_s: float = 5,
    early: bool = True,
    turn: AbstractAsyncContextManager[Any] | None = None,
) -> tuple[float | None, Failure | None]:
    """What comes of a checker that does this, of a desktop that `opening` gives."""
    checker = SimpleNamespace(claims=lambda _: True, check=check, begins_early=early)
    config = SimpleNamespace(checker_timeout_s=limit_s)
    host = cast(Host, SimpleNamespace(checkers={"planted": (checker, None)}, config=config))
    task = make_task()
    state = EndState(slot="s", episode="e", last_action=None, acted=True, outputs={})
    place = nullcontext(cast(Slot, SimpleNamespace())) if opening is None else opening
    return await _Check(task, state, None, kept=False).attempt(host, place, turn or nullcontext())


async def attempted(check: Check) -> Failure:
    """Why a checker that does this gives no score."""
    score, failure = await tried(check)
    assert score is None and failure is not None
    return failure


def raising(*errors: Exception, deep: bool = False) -> Check:
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
    asking = _Asking(Path("/none"), 5)
    asking._place = Unfreezable()
    asking._there.set()
    with pytest.raises(CheckerError, match="planted"):
        await asking.serve(fd)
    assert asking._faults == [fault]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@attrs.define
class Making:
    """A desktop that is still made while its check begins."""

    go_on: trio.Event = attrs.field(factory=trio.Event)
    fault: Exception | None = None
    made: bool = False
    left: bool = False

    @asynccontextmanager
    async def opening(self) -> AsyncIterator[Any]:
        """It, once it may go on."""
        await self.go_on.wait()
        await trio.sleep(0.05)
        if self.fault is not None:
            raise self.fault
        self.made = True
        try:
            yield SimpleNamespace()
        finally:
            self.left = True


async def test_a_check_begins_while_its_desktop_is_made() -> None:
    making, order = Making(), []

    async def check(context: Any) -> float:
        order.append(("begins", making.made))
        making.go_on.set()
        await context.wait_there()
        order.append(("asks", making.made and not making.left))
        return 0.5

    assert await tried(check, making.opening()) == (0.5, None)
    assert order == [("begins", False), ("asks", True)] and making.left


async def test_a_checker_that_does_not_know_of_it_begins_with_its_desktop() -> None:
    making = Making()
    making.go_on.set()

    async def check(context: Any) -> float:
        return float(making.made)

    assert await tried(check, making.opening(), early=False) == (1.0, None)


async def test_nothing_begins_before_its_turn() -> None:
    limit, begun = trio.CapacityLimiter(1), trio.Event()
    making = Making()
    making.go_on.set()

    async def check(context: Any) -> float:
        begun.set()
        return 1.0

    async with trio.open_nursery() as nursery, limit:
        nursery.start_soon(partial(tried, check, making.opening(), turn=limit))
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert not begun.is_set() and not making.made
    assert begun.is_set() and making.left


@pytest.mark.parametrize("by", ["a caller who is gone", "an error"])
async def test_a_check_that_is_cancelled_has_ended_before_its_desktop_does(by: str) -> None:
    making, order, there = Making(), [], trio.Event()
    making.go_on.set()

    async def check(context: Any) -> float:
        await context.wait_there()
        there.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)
            order.append(("the check has ended", making.left))
            if by == "an error":
                raise ValueError("planted: it is logged, and told to nobody")
        return 1.0

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tried, check, making.opening())
            await there.wait()
            scope.cancel()
    assert scope.cancelled_caught
    assert order == [("the check has ended", False)] and making.left


async def test_a_desktop_that_is_graded_in_place_is_served_and_its_listener_closed_once() -> None:
    async def check(context: Any) -> float:
        with socket.create_server(("127.0.0.1", 0)) as server:
            fd = server.detach()
        with trio.move_on_after(0.1) as scope:
            await context.serve_guest(fd)
        assert scope.cancelled_caught
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        return 1.0

    slot = SimpleNamespace(guest=SimpleNamespace(request=None))
    assert await tried(check, nullcontext(slot)) == (1.0, None)


@pytest.mark.parametrize("ask", ["steps", "guest", "port"])
async def test_nothing_reaches_a_desktop_before_it_is_there(ask: str, autojump_clock: trio.testing.MockClock) -> None:
    making = Making()

    async def check(context: Any) -> float:
        with socket.create_server(("127.0.0.1", 0)) as server:
            fd = server.detach()
        with socket.socket(fileno=os.dup(fd)) as listening:
            address = listening.getsockname()
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "steps": lambda: context.run_steps([]),
            "guest": lambda: context.serve_guest(fd),
            "port": lambda: context.serve_ports[9222](fd),
        }
        with trio.move_on_after(60) as scope, socket.create_connection(address):
            await ways[ask]()
        assert scope.cancelled_caught and not making.made
        if ask == "steps":
            os.close(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        making.go_on.set()
        await context.wait_there()
        return 1.0

    assert await tried(check, making.opening()) == (1.0, None)


async def test_a_check_that_ends_before_its_desktop_is_there_does_not_count_without_it() -> None:
    """Neither its score nor its error; what kept the desktop away is told."""
    for check in (returning(1.0), raising(ValueError("planted"))):
        making = Making(fault=CheckerError("the copy is broken", cause=Cause.INFRASTRUCTURE))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(let_go_on, making)
            score, failure = await tried(check, making.opening())
        assert (score, failure) == (None, Failure("the copy is broken", Cause.INFRASTRUCTURE))


async def test_a_desktop_that_cannot_be_had_ends_its_check() -> None:
    making, ended = Making(fault=CheckerError("the copy is broken")), []

    async def check(context: Any) -> float:
        making.go_on.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.append(True)

    assert await tried(check, making.opening()) == (None, Failure("the copy is broken"))
    assert ended == [True]


async def test_the_time_of_a_check_counts_from_when_its_desktop_is_there(
    autojump_clock: trio.testing.MockClock,
) -> None:
    making, took = Making(), []

    async def check(context: Any) -> float:
        await trio.sleep(60)
        making.go_on.set()
        await context.wait_there()
        began = trio.current_time()
        try:
            await trio.sleep(60)
        finally:
            took.append(trio.current_time() - began)
        return 1.0

    score, failure = await tried(check, making.opening(), limit_s=5)
    assert (score, failure) == (None, Failure("the checker did not end within 5 s"))
    assert took == [5.0]


async def let_go_on(making: Making) -> None:
    await trio.testing.wait_all_tasks_blocked()
    making.go_on.set()


def returning(score: float) -> Check:
    """A checker that asks nothing."""

    async def check(context: Any) -> float:
        return score

    return check
