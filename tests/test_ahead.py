"""What is entered beside a block: errors of either side cancel the other, and nothing stays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from drums_core.ahead import ahead


class Side:
    """A context manager that waits before it is entered, and says what became of it."""

    def __init__(self, *, enters: bool = True, fails: str = "", leaves_badly: bool = False) -> None:
        self.began, self.enters, self.fails, self.leaves_badly = trio.Event(), enters, fails, leaves_badly
        self.became = ""

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[str]:
        self.began.set()
        try:
            if self.fails:
                raise ValueError(self.fails)
            if not self.enters:
                await trio.sleep_forever()
            yield "given"
            self.became = "left"
            if self.leaves_badly:
                raise ValueError("while it was left")
        except trio.Cancelled:
            self.became = "cancelled"
            raise


async def test_it_goes_on_beside_and_is_left() -> None:
    side = Side()
    async with ahead(side()) as ready:
        await side.began.wait()
        assert await ready() == "given" == await ready()
        assert side.became == ""
    assert side.became == "left"


async def test_a_block_that_does_not_ask_waits_for_it_all_the_same() -> None:
    side = Side()
    async with ahead(side()):
        pass
    assert side.became == "left"


async def test_an_error_of_the_block_cancels_the_entering() -> None:
    side = Side(enters=False)
    with pytest.raises(KeyError, match="the block's"):
        async with ahead(side()):
            await side.began.wait()
            raise KeyError("the block's")
    assert side.became == "cancelled"


async def test_an_error_of_the_block_leaves_what_was_entered() -> None:
    side = Side()
    with pytest.raises(KeyError, match="the block's"):
        async with ahead(side()) as ready:
            await ready()
            raise KeyError("the block's")
    assert side.became in ("cancelled", "left")


@pytest.mark.parametrize("asks", [True, False])
async def test_an_error_of_the_entering_cancels_the_block(asks: bool) -> None:
    cleaned = False
    with pytest.raises(ValueError, match="planted"):
        async with ahead(Side(fails="planted")()) as ready:
            try:
                await trio.sleep_forever() if not asks else await ready()
            finally:
                cleaned = True
    assert cleaned


async def test_an_error_of_the_leaving_is_raised() -> None:
    with pytest.raises(ValueError, match="while it was left"):
        async with ahead(Side(leaves_badly=True)()) as ready:
            await ready()


async def test_of_two_errors_the_first_counts() -> None:
    with pytest.raises(KeyError, match="the block's"):
        async with ahead(Side(leaves_badly=True)()) as ready:
            await ready()
            raise KeyError("the block's")


@pytest.mark.parametrize("enters", [True, False])
async def test_cancellation_reaches_both(enters: bool) -> None:
    side = Side(enters=enters)
    with trio.CancelScope() as scope:
        async with ahead(side()):
            await side.began.wait()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught and side.became == "cancelled"
