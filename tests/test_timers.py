"""A program that waits for periodic timers goes on in a copy, whatever its timers were at as it was dumped."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from desktops import Played, judged, play, run, start_daemon
from requires import requires

from drums_core.host import Host

pytestmark = requires("root", "criu")

# Intervals in ms. The shortest fires while it is dumped: it is never read then.
TICKING = """
import ctypes, os, select, struct
libc = ctypes.CDLL(None)
timers = {}
for interval in (1, 20, 300):
    fd = libc.timerfd_create(1, os.O_NONBLOCK)
    libc.timerfd_settime(fd, 0, struct.pack("=4q", 0, interval * 10**6, 0, interval * 10**6), None)
    timers[fd] = [interval, 0]
rests = libc.timerfd_create(1, os.O_NONBLOCK)
libc.timerfd_settime(rests, 1, struct.pack("=4q", 0, 0, 0, 0), None)  # absolute, and stopped
open("/tmp/ticking.ready", "w").close()
while True:
    for fd in select.select(list(timers), [], [])[0]:
        os.read(fd, 8)
        timers[fd][1] += 1
        with open("/tmp/ticks.new", "w") as f:
            f.write(" ".join(str(count) for _, count in timers.values()))
        os.rename("/tmp/ticks.new", "/tmp/ticks")
"""
COPIES = 3


async def ticks(slot: Any) -> list[int]:
    return [int(x) for x in (await run(slot, "cat /tmp/ticks")).split()]


async def ticking(host: Host) -> Any:
    async with await host.create() as slot:
        await start_daemon(slot, "ticking", TICKING)
        found = []
        for child in await slot.fork(COPIES):
            async with child:
                before = await ticks(child)
                await trio.sleep(1.0)
                found.append((before, await ticks(child), await judged(child)))
        (grandchild_of,) = await slot.fork(1)
        async with grandchild_of, (await grandchild_of.fork(1))[0] as last:
            before = await ticks(last)
            await trio.sleep(1.0)
            found.append((before, await ticks(last), await judged(last)))
        return found


@pytest.fixture(scope="module")
def played() -> Played:
    return play({"ticking": ticking})


def test_timers_go_on(played: Played) -> None:
    found = played["ticking"]
    assert len(found) == COPIES + 1
    for before, after, judgement in found:
        assert judgement.verdict == "valid", judgement.reasons
        assert all(x < y for x, y in zip(before, after, strict=True)), (before, after)


def test_nothing_is_left(played: Played) -> None:
    assert not played.left
