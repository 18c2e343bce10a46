"""Desktops of the image `osworld` that live long, lose the kernel's caches, or are many at once.

`DRUMS_LIFE_MINUTES` says how long the first ones live before they are forked; 2 without it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from apps import APPS, OSWORLD, App
from desktops import Outcome, Played, Scenario, judged, make_task, outcome, play
from requires import osworld_files, requires

from drums_core.host import Host
from drums_core.slot import Slot

pytestmark = [requires("root", "criu", "osworld"), pytest.mark.applications]

LIFE_S = 60 * float(os.environ.get("DRUMS_LIFE_MINUTES", "2"))
MANY = 8
AT_ONCE = 10  # desktops, of one to two GB
# For all of a user's; a desktop's are counted as those of the host's root.
LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")


# Whose watches lose their handles each time: the desktop's own programs, and these applications.
LOSERS = frozenset({"dbus-daemon", "gnome-shell", "gsd-xsettings"})
OWN = {
    "chromium": "chrome",
    "eog": "eog",
    "evince": "evince",
    "gnome-control-center": "gnome-control-c",
    "nautilus": "nautilus",
    "thunderbird": "thunderbird",
}


def losers(name: str) -> frozenset[str]:
    """Those of a desktop with this application."""
    return LOSERS | {OWN[name]} if name in OWN else LOSERS


# --- a long life, and the kernel's caches


def lives_long(name: str, app: App) -> Scenario:
    """A desktop with the application; nothing happens for a long time, and then the kernel wants memory back.

    It is forked; then both have reacted, and been looked at.
    """

    async def scenario(host: Host) -> Any:
        async with await host.create(make_task(*app.steps()), image="osworld", ttl_s=LIFE_S + 900) as slot:
            await app.wait_open(slot)
            await trio.sleep(LIFE_S)
            drawn = {await app.pixels(slot)} if app.still else set()
            lost = await lose_handles(slot, losers(name))
            (child,) = await slot.fork(1)
            async with child:
                copied = {await app.pixels(child)} if app.still else set()
                verdict = await judged(child)
                reaction = await app.reaction(child)
                parent = await judged(slot)
                if app.still:
                    # A hint that goes by itself after a while does so in a copy as well.
                    drawn.add(await app.pixels(slot))
            return {
                "lost": lost,
                "drawn": drawn,
                "copied": copied,
                "child": verdict,
                "reaction": reaction,
                "parent": parent,
            }

    return scenario


async def lose_handles(slot: Slot, wanted: Set[str]) -> Mapping[str, str]:
    """Let the kernel forget the entries of watched folders, as it does under memory pressure.

    Args:
        wanted: the programs of which it must have forgotten some; there are some tries.

    Returns:
        By program: how many of its watches have no file handle now, as CRIU needs, of how many.
    """
    for _ in range(20):
        lost = await trio.to_thread.run_sync(drop_handles, slot)
        if wanted <= lost.keys():
            break
        await trio.sleep(0.2)
    return lost


def drop_handles(slot: Slot) -> Mapping[str, str]:
    """Have the kernel drop what it can, once."""
    Path("/proc/sys/vm/drop_caches").write_text("2")
    watches: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for name, lines in instances(slot):
        watches[name] += len(lines)
        lost[name] += sum("fhandle-bytes" not in line for line in lines)
    return {name: f"{count} of {watches[name]}" for name, count in sorted(lost.items()) if count}


def instances(slot: Slot) -> list[tuple[str, list[str]]]:
    """The inotify descriptors of a desktop: whose each is, by the program's name, and its watches' lines."""
    assert slot.desktop is not None
    found = []
    for pid in slot.desktop.cgroup.pids():
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{fd}") == "anon_inode:inotify":
                    lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    found.append((name, [line for line in lines if line.startswith("inotify wd:")]))
    return found


# --- many at once


async def many(host: Host) -> Any:
    """Eight at once, each with its own watches, all counted as the host's."""
    app = APPS["nautilus"]
    async with await host.create(make_task(*app.steps()), image="osworld") as slot:
        await app.wait_open(slot)
        before = len(await trio.to_thread.run_sync(instances, slot))
        children = await slot.fork(MANY - 1)
        counts = [len(await trio.to_thread.run_sync(instances, x)) for x in (slot, *children)]
        found: dict[str, Outcome] = {}

        async def look(child: Slot) -> None:
            await judged(child)
            await app.reaction(child)
            found[child.id] = outcome(child)

        async with trio.open_nursery() as nursery:
            for child in (slot, *children):
                nursery.start_soon(look, child)
        for child in children:
            await child.close()
        return {"outcomes": found, "before": before, "counts": counts}


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Played:
    files = osworld_files(OSWORLD)
    # Those that were selected, and no others.
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    names = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    scenarios = {name: lives_long(name, app) for name, app in APPS.items() if name in names}
    return play({**scenarios, "many": many}, at_once=AT_ONCE, file_mirror=files)


@pytest.mark.parametrize("name", APPS)
def test_a_desktop_that_has_lived_long_is_forked(
    played: Played, name: str, record_property: Callable[[str, object], None]
) -> None:
    """After its watches have lost their handles: same pixels, all gates, and a reaction."""
    found = played[name]
    record_property("lost_handles", json.dumps(found["lost"]))
    print(f"{name}: watches without a file handle when it was forked: {found['lost']}")
    assert losers(name) <= found["lost"].keys(), "the fault was not planted"
    for slot in ("child", "parent"):
        assert found[slot].verdict == "valid", found[slot].reasons
    assert found["copied"] <= found["drawn"] and len(found["copied"]) == APPS[name].still
    before, after = found["reaction"]
    assert before != after


def test_eight_at_once(played: Played) -> None:
    """All are valid and have all their inotify instances, which fit into what the host's root may have in all."""
    found = played["many"]
    assert len(found["outcomes"]) == MANY
    assert {x.verdict for x in found["outcomes"].values()} == {"valid"}, found["outcomes"]
    print(f"inotify instances of {MANY} desktops: {found['counts']}, the host's limit is {LIMIT.read_text()}")
    assert found["counts"] == [found["before"]] * MANY and found["before"] > 1
    assert sum(found["counts"]) <= int(LIMIT.read_text())


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
