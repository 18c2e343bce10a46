"""Getters that ask a desktop's browser and VLC, in whole verifies of real desktops, where stand-ins listen.

The image `minimal` has no applications; the real ones are in `test_applications_getters.py`.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from desktops import Played, Scenario, make_task, play, run, start_daemon
from requires import requires

from drums_core.copies import Copy, open_copy
from drums_core.host import Host
from drums_core.model import Cause, Reward, SetupStep, Task

pytestmark = requires("root", "criu")

HERE = Path(__file__).parent
PAGES = ("file:///a.html", "file:///b.html")
TABS = {
    "func": "is_expected_tabs",
    "result": {"type": "open_tabs_info"},
    "expected": {"type": "rule", "rules": {"type": "url", "urls": list(PAGES)}},
}
PLAYS = {
    "func": "is_vlc_playing",
    "result": {"type": "vlc_playing_info", "dest": "status.xml"},
    "expected": {"type": "rule", "rules": {"type": "file_name", "file_name": "film.mp4"}},
}
BOTH = {key: [TABS[key], PLAYS[key]] for key in TABS}
UNPACK = "import base64, sys; open(sys.argv[1], 'wb').write(base64.b64decode(sys.argv[2]))"
IMPOSTOR = """
import socket
server = socket.create_server(("127.0.0.1", 8080))
while True:
    client, _ = server.accept()
    client.recv(99)
    client.sendall(b"x" * 99)
    client.close()
"""
TICKING = "import os, time\nopen('/tmp/tick.ready', 'w').close()\nwhile True:\n    os.utime('/tmp/tick.ready')\n"


def task(evaluator: dict[str, Any], *programs: tuple[str, ...]) -> Task:
    """One whose set-up lets stand-ins listen."""
    steps = []
    for name in ("port_server.py", "browser_server.py"):
        text = base64.b64encode((HERE / name).read_bytes()).decode()
        steps.append(SetupStep("execute", {"command": ["python3", "-c", UNPACK, f"/tmp/{name}", text]}))
    for program in programs:
        steps.append(SetupStep("launch", {"command": ["python3", "/tmp/browser_server.py", *program]}))
        wait = f"until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {program[1]}))'; do :; done"
        steps.append(SetupStep("execute", {"command": wait, "shell": True}))
    return attrs.evolve(make_task(*steps), evaluator=evaluator)


BROWSER = ("cdp", "9222", *PAGES)
VLC = ("vlc", "8080", "playing", "film.mp4")


def verified(evaluator: dict[str, Any], *programs: tuple[str, ...], act: str = "", in_place: bool = True) -> Scenario:
    """Rewards of a copy, and in place."""

    async def scenario(host: Host) -> list[Reward]:
        async with await host.create(task(evaluator, *programs)) as slot:
            if act:
                await run(slot, act)
            ways = (False, True) if in_place else (False,)
            return [await slot.verify(strict=False, in_place=way) for way in ways]

    return scenario


async def what_lives(host: Host) -> dict[str, Any]:
    """Once a port was asked, or a program was started, the copy lives on until a request that needs less."""

    async def ticks(copy: Copy) -> bool:
        """Whether the agent's process runs, as the host sees it: the copy is asked nothing."""
        path = trio.Path(f"/proc/{copy.desktop.pid1}/root/tmp/tick.ready")
        before = (await path.stat()).st_mtime_ns
        await trio.sleep(1)
        return (await path.stat()).st_mtime_ns != before

    async def rests(copy: Copy) -> None:
        body = json.dumps({"command": ["true"]}).encode()
        await copy.request("POST", "/execute", body, [("Content-Type", "application/json")])

    found: dict[str, Any] = {}
    async with await host.create(task(PLAYS, VLC)) as slot:
        await slot.wait_valid()
        await start_daemon(slot, "tick", TICKING)
        async with open_copy(slot) as copy, copy.frozen():
            found["at first"] = await ticks(copy)
            async with copy.connect_port(8080) as stream:
                await stream.send_all(b"GET / HTTP/1.0\r\n\r\n")
                found["said"] = await stream.receive_some(8)
            found["after a port"] = await ticks(copy)
            await rests(copy)
            found["after a command"] = await ticks(copy)
            body = json.dumps({"command": ["sh", "-c", "sleep 1; touch /tmp/came-up"]}).encode()
            await copy.request("POST", "/setup/launch", body, [("Content-Type", "application/json")])
            found["after a start"] = await ticks(copy)
            async with copy.connect_port(8080):
                await rests(copy)
                found["beside a connection"] = await ticks(copy)
            await rests(copy)
            found["at the end"] = await ticks(copy)
            found["thawed"] = [x["for"] for x in copy.thawed]
    return found


SCENARIOS: dict[str, Scenario] = {
    "right": verified(BOTH, BROWSER, VLC),
    "wrong tabs": verified(TABS, BROWSER[:-1]),
    "wrong film": verified(PLAYS, ("vlc", "8080", "playing", "other.mp4")),
    "stopped film": verified(PLAYS, ("vlc", "8080", "stopped", "film.mp4"), in_place=False),
    "torn": verified(TABS, ("torn", *BROWSER[1:])),
    "never there": verified(PLAYS, act="true"),
    "nobody acted": verified(PLAYS),
    "closed by the agent": verified(BOTH, BROWSER, VLC, act="pkill -f '[b]rowser_server.py vlc'"),
    "taken by the agent": verified(PLAYS, act=f"python3 -c '{IMPOSTOR}' >/dev/null 2>&1 & sleep 1"),
    "what lives": what_lives,
}


@pytest.fixture(scope="module")
def played() -> Played:
    return play(SCENARIOS)


def scores(rewards: list[Reward]) -> list[float | None]:
    return [reward.score for reward in rewards]


def test_the_desktop_that_is_graded_is_asked(played: Played) -> None:
    copy, in_place = played["right"]
    assert (copy.score, in_place.score) == (1.0, 1.0), (copy.checker_error, in_place.checker_error)
    assert [x["for"] for x in copy.provenance["graded"]["thawed"]] == ["port 9222", "port 8080"]
    assert "thawed" not in in_place.provenance["graded"]


@pytest.mark.parametrize("name", ["wrong tabs", "wrong film", "stopped film"])
def test_what_is_not_as_wanted_scores_0(played: Played, name: str) -> None:
    assert {*scores(played[name])} == {0.0}, [x.checker_error for x in played[name]]


def test_a_browser_that_breaks_off_gives_no_score(played: Played) -> None:
    """Its getter goes on with what it has, which would be right."""
    for reward in played["torn"]:
        assert reward.score is None and "port 9222 of the desktop broke the websocket off" in reward.checker_error


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("never there", None),
        ("nobody acted", None),
        ("closed by the agent", Cause.AGENT),
        ("taken by the agent", Cause.AGENT),
    ],
)
def test_vlc_that_cannot_be_asked_gives_no_score(played: Played, name: str, cause: Cause | None) -> None:
    """And the agent is named where the host saw that a program listened when it began, or what only it can have put."""
    for reward in played[name]:
        assert reward.score is None and "could not ask the desktop: port 8080" in reward.checker_error
        assert reward.checker_error_cause == (cause.value if cause else "unknown")
        told = reward.provenance["checker_error_evidence"]
        assert bool(told) is (cause is not None)
    if name == "closed by the agent":
        assert told == ["nothing listens on port 8080, as a program did when the agent began"]


def test_the_copy_lives_as_long_as_it_takes(played: Played) -> None:
    found = played["what lives"]
    assert found["said"].startswith(b"HTTP/1.0")
    lives = {name for name, value in found.items() if value is True}
    assert lives == {"after a port", "after a start", "beside a connection"}, found
    assert found["thawed"] == ["port 8080", "POST /setup/launch"]


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
