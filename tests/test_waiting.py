"""A wait for a descriptor does not end before there is something to read, whatever wakes it."""

from __future__ import annotations

import os

import pytest
import trio
import trio.lowlevel
import trio.testing

from drums_core.sys.waiting import wait_readable


async def test_woken_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As trio does where the number was another descriptor's a moment ago."""
    plain, woken = trio.lowlevel.wait_readable, [0]

    async def early(fd: int) -> None:
        woken[0] += 1
        if woken[0] > 3:
            await plain(fd)
        else:
            await trio.lowlevel.checkpoint()

    monkeypatch.setattr(trio.lowlevel, "wait_readable", early)
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        async with trio.open_nursery() as nursery:
            ended = trio.Event()

            async def wait() -> None:
                await wait_readable(fd)
                ended.set()

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert woken[0] == 4 and not ended.is_set()
            os.eventfd_write(fd, 1)
            with trio.fail_after(5):
                await ended.wait()
        assert os.eventfd_read(fd) == 1
    finally:
        os.close(fd)
