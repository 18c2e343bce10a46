"""Desktops of the image `osworld` that live long, lose the kernel's caches, or are many at once.

`DRUMS_LIFE_MINUTES` says how long the first ones live before they are forked; 2 without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from apps import APPS, OSWORLD, App
from desktops import Outcome, Played, Scenario, judged, make_task, outcome, play, run
from requires import osworld_files, requires

from drums_core.host import Host
from drums_core.slot import Slot

pytestmark = [requires("root", "criu"), pytest.mark.applications]

LIFE_S = 60 * float(os.environ.get("DRUMS_LIFE_MINUTES", "2"))
MANY = 8
AT_ONCE = 10  # desktops, of one to two GB


async def fork_and_look(slot: Slot, app: App) -> Mapping[str, Any]:
    """A fork's verdict, and whether the application reacts in it."""
    (child,) = await slot.fork(1)
    async with child:
        verdict = await judged(child)
        return {"child": verdict, "reaction": await app.reaction(child), "parent": await judged(slot)}


def lives_long(app: App) -> Scenario:
    """A desktop with the application; nothing happens for a long time, and then the kernel wants memory back."""

    async def scenario(host: Host) -> Any:
        async with await host.create(make_task(*app.steps()), image="osworld", ttl_s=LIFE_S + 900) as slot:
            await app.wait_open(slot)
            await trio.sleep(LIFE_S)
            await trio.to_thread.run_sync(drop_handles, slot)
            return await fork_and_look(slot, app)

    return scenario


def drop_handles(slot: Slot) -> int:
    """Have the kernel drop what it can; how many watches of a desktop are left without a file handle, as CRIU needs."""
    assert slot.desktop is not None
    Path("/proc/sys/vm/drop_caches").write_text("2")
    lines = []
    for pid in slot.desktop.cgroup.pids():
        for path in Path(f"/proc/{pid}/fdinfo").iterdir():
            lines += [line for line in path.read_text().splitlines() if line.startswith("inotify wd:")]
    return sum("fhandle-bytes" not in line for line in lines)


async def loses_caches(host: Host) -> Any:
    """The kernel forgets the entries of watched folders, as it does under memory pressure."""
    app = APPS["gedit"]
    async with await host.create(make_task(*app.steps()), image="osworld") as slot:
        await app.wait_open(slot)
        lost = 0
        for _ in range(20):
            if lost := await trio.to_thread.run_sync(drop_handles, slot):
                break
            await trio.sleep(0.2)
        return {**await fork_and_look(slot, app), "lost": lost}


async def many(host: Host) -> Any:
    """Eight at once, each with its own watches, all counted as the host's."""
    app = APPS["nautilus"]
    async with await host.create(make_task(*app.steps()), image="osworld") as slot:
        await app.wait_open(slot)
        children = await slot.fork(MANY - 1)
        found: dict[str, Outcome] = {}

        async def look(child: Slot) -> None:
            await judged(child)
            await app.reaction(child)
            found[child.id] = outcome(child)

        async with trio.open_nursery() as nursery:
            for child in (slot, *children):
                nursery.start_soon(look, child)
        watches = await run(slot, "find /proc/[0-9]*/fd -lname 'anon_inode:inotify' 2>/dev/null | wc -l")
        for child in children:
            await child.close()
        return {"outcomes": found, "watches": int(watches)}


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Played:
    files = osworld_files(OSWORLD)
    # Those that were selected, and no others.
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    names = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    scenarios = {name: lives_long(app) for name, app in APPS.items() if name in names}
    scenarios |= {x.__name__: x for x in (loses_caches, many)}
    return play(scenarios, at_once=AT_ONCE, file_mirror=files)


def check(found: Mapping[str, Any]) -> None:
    for slot in ("child", "parent"):
        assert found[slot].verdict == "valid", found[slot].reasons
    before, after = found["reaction"]
    assert before != after


@pytest.mark.parametrize("name", APPS)
def test_a_desktop_that_has_lived_long_is_forked(played: Played, name: str) -> None:
    check(played[name])


def test_a_desktop_whose_watches_lost_their_handles_is_forked(played: Played) -> None:
    found = played["loses_caches"]
    assert found["lost"] > 0, "the fault was not planted"
    check(found)


def test_eight_at_once(played: Played) -> None:
    found = played["many"]
    assert len(found["outcomes"]) == MANY
    assert {x.verdict for x in found["outcomes"].values()} == {"valid"}, found["outcomes"]
    assert found["watches"] > 1


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
