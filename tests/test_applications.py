"""Every application of the `osworld` image with a document open: a checkpoint, four forks at once, a chain of three.

All gates pass, the window's pixels are the same, and it still reacts; its parent does not react with it. One of them is
in every run of the tests, the others with `./run test --all`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import attrs
import pytest
import trio
from apps import APPS, OSWORLD, App
from desktops import Outcome, Played, Scenario, judged, make_task, outcome, play, run
from requires import osworld_files, requires

from drums_core.host import Host
from drums_core.slot import Slot

pytestmark = requires("root", "criu", "osworld")

ALWAYS = "calc"
FORKS = 4
# Two desktops' applications at a time: each has six desktops while it is forked.
AT_ONCE = 2


@attrs.frozen
class Survived:
    """What a desktop and its copies showed."""

    outcomes: Mapping[str, Outcome]  # of the parent, each fork, and the end of the chain
    drawn: Set[str]  # the parent's window before the fork, and at the end
    pixels: Mapping[str, str]  # the copies' windows
    reactions: Mapping[str, tuple[str, str]]
    parents_states: tuple[str, str]  # before its children's reactions, and after them


def survives(app: App) -> Scenario:
    """A desktop with the application, forked four times at once, and a fork's fork's fork."""

    async def scenario(host: Host) -> Survived:
        pixels: dict[str, str] = {}
        reactions: dict[str, tuple[str, str]] = {}
        outcomes: dict[str, Outcome] = {}

        async def look(name: str, slot: Slot) -> None:
            if app.still:
                pixels[name] = await app.pixels(slot)
            # Input before the judgement may rightly end a process: Chromium gives a new tab a renderer that it kept.
            await judged(slot)
            reactions[name] = await app.reaction(slot)
            outcomes[name] = outcome(slot)

        async with await host.create(make_task(*app.steps()), image="osworld") as parent:
            await app.wait_open(parent)
            before = await run(parent, app.state)
            drawn = {await app.pixels(parent)} if app.still else set()
            children = await parent.fork(FORKS)
            (grandchild,) = await children[0].fork(1)
            (last,) = await grandchild.fork(1)
            async with trio.open_nursery() as nursery:
                for number, child in enumerate(children):
                    nursery.start_soon(look, f"fork {number + 1}", child)
                nursery.start_soon(look, "end of the chain", last)
            outcomes["parent"] = await judged(parent)
            after = await run(parent, app.state)
            if app.still:
                # A hint that goes by itself after a while does so in a copy as well.
                drawn.add(await app.pixels(parent))
            for slot in (last, grandchild, *children):
                await slot.close()
        return Survived(outcomes, drawn, pixels, reactions, (before, after))

    return scenario


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Played:
    files = osworld_files(OSWORLD)
    # Those that were selected, and no others.
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    names = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    scenarios = {name: survives(app) for name, app in APPS.items() if name in names}
    return play(scenarios, at_once=AT_ONCE, file_mirror=files)


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x == ALWAYS else pytest.mark.applications) for x in APPS])
def test_application_survives(played: Played, name: str) -> None:
    found: Survived = played[name]
    assert {copy: (x.verdict, x.reasons) for copy, x in found.outcomes.items() if x.verdict != "valid"} == {}
    assert {*found.pixels.values()} <= found.drawn
    assert len(found.pixels) == (FORKS + 1 if APPS[name].still else 0)
    for copy, (before, after) in found.reactions.items():
        assert before == found.parents_states[0] != after, copy
    assert len(found.reactions) == FORKS + 1
    before, after = found.parents_states
    assert before == after, "a child's reaction reached its parent"


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
