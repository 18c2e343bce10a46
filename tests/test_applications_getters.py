"""Getters that ask Chromium and VLC, in whole verifies of OSWorld's own tasks on the image `osworld`.

Scored on a copy and in place, and by OSWorld's unmodified `DesktopEnv.evaluate` on the same desktop. They take minutes,
so they run with `./run test --all` only; else stand-ins do, in `test_getters_on_desktops.py`. The live web is not
reached: the tasks' pages are the desktop's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from apps import OSWORLD
from desktops import Played, play, run
from requires import osworld_files, requires

from drums_core import load_config
from drums_core.host import Host
from drums_core.model import Cause, Reward, SetupStep, Task
from drums_core.slot import Slot
from drums_osworld.catalogue import OSWorldCatalogue
from drums_osworld.parity.comparison import Answer, ask_reference
from drums_osworld.parity.states import State

pytestmark = [requires("root", "criu", "osworld"), pytest.mark.applications]

# Of the tasks' pages: where they are here.
WEB = "http://localhost:8123/"
PAGES = ("lonelyplanet", "airbnb", "tripadvisor")
SERVE = 'mkdir -p ~/web && cd ~/web && for i in {}; do echo "<title>$i</title><p class=where>$i</p>" > $i.html; done'
UNTIL = "for i in $(seq 300); do {} && exit 0; sleep 0.1; done; exit 1"
FILM = "Rick Astley - Never Gonna Give You Up (Official Music Video).mp4"
_FILM_OF = "ffmpeg -v error -y -f lavfi -i testsrc=size=320x180:rate=10:duration=600 -pix_fmt yuv420p"
STATUS = "curl -s -u :password http://127.0.0.1:8080/requests/status.xml"


@attrs.frozen
class Scored:
    """A state of a desktop, scored three ways; the reference has none where the desktop could not be asked."""

    copy: Reward
    in_place: Reward
    reference: Answer | None

    def scores(self) -> tuple[float | None, ...]:
        """Of the three."""
        reference = self.reference.score if self.reference else None
        return self.copy.score, self.in_place.score, reference


async def scored(slot: Slot, task: Task, *, reference: bool = True) -> Scored:
    """Score a desktop as it is. The copy first, since the others may change it."""
    copy = await slot.verify(strict=False, in_place=False)
    in_place = await slot.verify(strict=False, in_place=True)
    return Scored(copy, in_place, await ask_reference(slot, task, State("as it is")) if reference else None)


def the_task(prefix: str) -> Task:
    return OSWorldCatalogue(load_config()).find(prefix)


def step(kind: str, **parameters: Any) -> SetupStep:
    return SetupStep(kind, parameters)


def with_pages(task: Task, moved: Mapping[str, str], *first: SetupStep) -> Task:
    """The task, with the pages of the web that it names served by the desktop itself."""
    text = json.dumps({"config": [attrs.asdict(x) for x in task.config], "evaluator": task.evaluator})
    for there, here in moved.items():
        assert there in text
        text = text.replace(there, here)
    document = json.loads(text)
    serve = (
        step("execute", command=SERVE.format(" ".join(PAGES)), shell=True),
        step("launch", command=["python3", "-m", "http.server", "8123", "--directory", "/home/user/web"]),
    )
    config = (*serve, *first, *(SetupStep(**x) for x in document["config"]))
    return attrs.evolve(task, config=config, evaluator=document["evaluator"], needs_web=False)


def browser_on(page: str) -> tuple[SetupStep, ...]:
    """The steps of OSWorld's tasks about a browser."""
    return (
        step("launch", command=["google-chrome", "--remote-debugging-port=1337"]),
        step("launch", command=["socat", "tcp-listen:9222,fork", "tcp:localhost:1337"]),
        step("chrome_open_tabs", urls_to_open=[f"{WEB}{page}.html"]),
    )


async def tabs(host: Host) -> dict[str, Any]:
    """06fe7178, "bring back the last tab I shut down": the browser has it not, has it, is closed, cannot be had."""
    task = with_pages(the_task("06fe7178"), {f"https://www.{x}.com": f"{WEB}{x}.html" for x in PAGES})
    found: dict[str, Any] = {}
    async with await host.create(task, image="osworld") as slot:
        await slot.wait_valid()
        found["not yet"] = await scored(slot, task)
        await run(
            slot, f"xdotool key ctrl+shift+t; {UNTIL.format('curl -s 127.0.0.1:1337/json | grep -q tripadvisor')}"
        )
        found["done"] = await scored(slot, task)
        for _ in range(3):
            await run(slot, "killall -q chrome; sleep 3; true")
            found["browser closed"] = await scored(slot, task)
            if None not in found["browser closed"].scores():
                break  # else one that it started was not there within its 5 s: a busy machine
        await run(slot, "killall -q socat; sleep 1; true")
        found["unreachable"] = await scored(slot, task, reference=False)
        return found


async def active_tab(host: Host) -> dict[str, Any]:
    """a96b564e's checker, on pages of the desktop's: the accessibility tree, and then the browser."""
    real = the_task("a96b564e")
    rules = {"type": "rule", "rules": {"type": "url", "url": f"{WEB}airbnb.html"}}
    result = {"type": "active_tab_info", "goto_prefix": "http://"}
    evaluator = {"func": real.evaluator["func"], "result": result, "expected": rules}
    task = with_pages(attrs.evolve(real, config=(), evaluator=evaluator), {}, *browser_on("tripadvisor"))
    found: dict[str, Any] = {}
    async with await host.create(task, image="osworld") as slot:
        await slot.wait_valid()
        found["another page"] = await scored(slot, task)
        shown = UNTIL.format("curl -s 127.0.0.1:1337/json | grep -q 'url.*airbnb' && wmctrl -l | grep -q airbnb")
        await run(slot, f"xdotool key ctrl+l; sleep 1; xdotool type '{WEB}airbnb.html'; xdotool key Return; {shown}")
        found["the page"] = await scored(slot, task)
        await run(slot, "killall -q socat; sleep 1; true")
        found["unreachable"] = await scored(slot, task, reference=False)
        await run(slot, "killall -q chrome; sleep 3; true")
        found["no browser shown"] = await scored(slot, task)
        return found


async def pages(host: Host) -> dict[str, Any]:
    """Getters that read the page that is shown, or load one themselves: one that is there, and one that is not."""
    shown = {
        "type": "active_tab_html_parse",
        "goto_prefix": "http://",
        "category": "class",
        "class_singleObject": {"where": "place"},
    }
    website = {"type": "info_from_website", "infos": [{"action": "inner_text", "selector": "p"}], "backups": ["kept"]}
    there, nowhere = f"{WEB}airbnb.html", "http://localhost:1/"

    def one(function: str, result: dict[str, Any], **rules: Any) -> dict[str, Any]:
        return {"func": function, "result": result, "expected": {"type": "rule", "rules": rules}}

    evaluators = {
        # First, since loading a page in place shows that one.
        "shown": one("check_direct_json_object", shown, expected={"place": "tripadvisor"}),
        "page": one("is_expected_active_tab", {"type": "page_info", "url": there}, type="url", url=there),
        "no page": one("is_expected_active_tab", {"type": "page_info", "url": nowhere}, type="url", url=there),
        "website": one("exact_match", {**website, "url": there}, expected=["airbnb"]),
        "no website": one("exact_match", {**website, "url": nowhere}, expected=["kept"]),
    }
    task = with_pages(attrs.evolve(the_task("a96b564e"), config=()), {}, *browser_on("tripadvisor"))
    found: dict[str, Any] = {}
    async with await host.create(task, image="osworld") as slot:
        await slot.wait_valid()
        for name, evaluator in evaluators.items():
            slot.task = attrs.evolve(task, evaluator=evaluator)
            found[name] = await scored(slot, slot.task)
        return found


async def film(host: Host) -> dict[str, Any]:
    """59f21cfb, "play the music video on my desktop": VLC idle, playing another, playing it, and gone."""
    real = the_task("59f21cfb")
    make = f"mkdir -p ~/Desktop && cd ~/Desktop && {_FILM_OF} '{FILM}' && cp '{FILM}' other.mp4"
    config = (step("execute", command=make, shell=True), *real.config[1:])
    task = attrs.evolve(real, config=config)
    found: dict[str, Any] = {}

    async def play_film(slot: Slot, name: str) -> None:
        await run(slot, "killall -q vlc; sleep 1; true")
        vlc = f"setsid vlc --no-audio --no-video-title-show '/home/user/Desktop/{name}' >/dev/null 2>&1 </dev/null &"
        await run(slot, f"{vlc}\n{UNTIL.format(f'{STATUS} | grep -q state.playing')}")

    async with await host.create(task, image="osworld") as slot:
        await slot.wait_valid()
        await run(slot, UNTIL.format(f"{STATUS} | grep -q state.stopped"))
        found["idle"] = await scored(slot, task)
        await play_film(slot, "other.mp4")
        found["another film"] = await scored(slot, task)
        await play_film(slot, FILM)
        found["the film"] = await scored(slot, task)
        await run(slot, "killall vlc; sleep 2")
        found["closed"] = await scored(slot, task, reference=False)
        return found


@pytest.fixture(scope="module")
def played() -> Played:
    osworld_files(OSWORLD)
    return play({"tabs": tabs, "active tab": active_tab, "pages": pages, "film": film}, at_once=2, osworld=OSWORLD)


@pytest.mark.parametrize(
    ("scenario", "state", "score"),
    [
        ("tabs", "not yet", 0.0),
        ("tabs", "done", 1.0),
        ("tabs", "browser closed", 0.0),  # its getter starts one, and finds none of the tabs
        ("active tab", "another page", 0.0),
        ("active tab", "the page", 1.0),
        ("active tab", "no browser shown", 0.0),  # the accessibility tree says so, and it asks no further
        ("pages", "shown", 1.0),
        ("pages", "page", 1.0),
        ("pages", "website", 1.0),
        ("pages", "no website", 1.0),  # the task says what holds then
        ("film", "idle", 0.0),
        ("film", "another film", 0.0),
        ("film", "the film", 1.0),
    ],
)
def test_scores_agree_with_osworlds_own(played: Played, scenario: str, state: str, score: float) -> None:
    found: Scored = played[scenario][state]
    assert found.scores() == (score, score, score), (found.copy.checker_error, found.in_place.checker_error, found)


@pytest.mark.parametrize(
    ("scenario", "state", "port"),
    [("tabs", "unreachable", 9222), ("active tab", "unreachable", 9222), ("film", "closed", 8080)],
)
def test_a_desktop_that_cannot_be_asked_gives_no_score(played: Played, scenario: str, state: str, port: int) -> None:
    """Where OSWorld's own code has a 0 or breaks off; and the agent is named, who has closed what listened."""
    found: Scored = played[scenario][state]
    for reward in (found.copy, found.in_place):
        assert reward.score is None and f"could not ask the desktop: port {port}" in str(reward.checker_error)
        assert reward.checker_error_cause == Cause.AGENT.value, reward.provenance["checker_error_evidence"]
        told = reward.provenance["checker_error_evidence"]
        assert f"nothing listens on port {port}, as a program did when the agent began" in told


def test_a_page_that_does_not_load_gives_no_score(played: Played) -> None:
    """Where OSWorld's own code takes "Connection failed" for the page."""
    found: Scored = played["pages"]["no page"]
    assert found.scores() == (None, None, 0.0)
    for reward in (found.copy, found.in_place):
        assert "the browser could not load a page" in str(reward.checker_error)


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
