"""Waiting for a descriptor."""

from __future__ import annotations

import select

import trio


async def wait_readable(fd: int) -> None:
    """Wait until a descriptor is readable.

    `trio.lowlevel.wait_readable` may return early: what the kernel told of a descriptor that is closed by now wakes
    whoever waits for a new one with its number. A desktop whose init lives must not be taken for one whose init ended.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not poll.poll(0):
        await trio.lowlevel.wait_readable(fd)
