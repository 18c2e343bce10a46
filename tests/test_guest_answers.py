"""What the guest server answers where OSWorld's clients and checkers look, on a throw-away desktop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from test_guest_server import SECRET, Desktop, ask_json, desktop, wait_titles

from drums_core.guest_client import GuestClient
from drums_core.guest_gateway import serve_guest

__all__ = ["desktop"]  # the fixture


@asynccontextmanager
async def gateway(desktop: Desktop, failures: list[str]) -> Any:
    """The gateway before the desktop; gives a function that asks it, for status and document."""
    netns = os.open(f"/proc/{desktop.pid}/ns/net", os.O_RDONLY)
    listener = trio.socket.socket()
    await listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]

    async def ask(method: str, target: str, **document: Any) -> tuple[int, Any]:
        body = json.dumps(document).encode()
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            reply = b"".join([part async for part in stream])
        return int(reply.split()[1]), json.loads(reply.partition(b"\r\n\r\n")[2])

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_guest, GuestClient(netns, SECRET).request, listener.detach(), failures)
            yield ask
            nursery.cancel_scope.cancel()
    finally:
        os.close(netns)


def test_python_answers_in_osworlds_fields(desktop: Desktop) -> None:
    """Each refusal has `error`, which OSWorld's client reads: without it, it would run the code again."""
    ask = partial(ask_json, desktop, "POST", "/run_python")
    both = "import sys; print('out'); print('err', file=sys.stderr)"
    status, answer = ask(code=both)
    assert (status, answer["status"], answer["message"]) == (200, "success", "out\n\nerr\n")
    assert (answer["need_more"], answer["output"], answer["error"], answer["return_code"]) == (
        False,
        "out\n",
        "err\n",
        0,
    )
    answer = ask(code="raise SystemExit(7)")[1]
    assert (answer["status"], answer["return_code"], answer["error"]) == ("error", 7, "Process exited with code 7")
    assert answer["message"] == answer["error"]
    status, answer = ask(code="while True: pass", timeout=0.5)
    assert (status, answer["error"], answer["output"]) == (500, "TimeoutExpired", None)
    assert (answer["status"], answer["need_more"]) == ("error", False) and "timed out" in answer["message"]
    status, answer = ask(code="")
    assert (status, answer["message"], answer["error"]) == (400, "Code not supplied!", "Code not supplied!")


def test_refusals_have_both_of_osworlds_words(desktop: Desktop) -> None:
    for method, target, expected in (("POST", "/list_directory", 400), ("POST", "/file", 400), ("GET", "/none", 404)):
        status, answer = ask_json(desktop, method, target, path="/nowhere")
        assert (status, answer["status"]) == (expected, "error") and answer["error"] == answer["message"]


def test_lines_end_in_one_way(desktop: Desktop) -> None:
    """OSWorld's server reads text, in which Python makes every line's end one kind."""
    assert desktop.execute("printf 'a\\r\\nb\\rc\\n'")["output"] == "a\nb\nc\n"
    assert ask_json(desktop, "POST", "/run_bash_script", script="printf 'a\\r\\n'")[1]["output"] == "a\n"


def test_verifying_begins_after_the_command_and_asks_for_no_longer_than_osworld(desktop: Desktop) -> None:
    """A slow command leaves the whole wait; one that verifies is cut off after 5 s and asked again."""
    ask = partial(ask_json, desktop, "POST", "/execute_with_verification", shell=True, check_interval=0.1)
    late = {"command_success": "test -e ~/later"}
    status, answer = ask(
        command="sleep 2; (sleep 1; touch ~/later) >/dev/null 2>&1 &", verification=late, max_wait_time=1.9
    )
    assert (status, answer["verification"]) == (200, "passed")
    slow = {"command_success": "[ -e ~/asked ] || { touch ~/asked; sleep 60; }"}
    began = time.monotonic()
    assert ask(command="true", verification=slow, max_wait_time=20)[0] == 200
    assert 4 < time.monotonic() - began < 15
    assert "verification" not in ask(command="true")[1]


@pytest.fixture
def gsettings(desktop: Desktop) -> Iterator[Any]:
    """Has `gsettings` say something: a function of its script."""
    path = desktop.root / "usr/local/bin/gsettings"

    def say(script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    yield say
    path.unlink(missing_ok=True)


def test_the_wallpaper_is_what_the_setting_says(desktop: Desktop, gsettings: Any) -> None:
    """Its URI, or a path, which GNOME does not show but OSWorld takes; no answer is no fact about the desktop."""
    desktop.execute("echo picture > '/home/user/a picture'")
    for said in ("file:///home/user/a%20picture", "/home/user/a picture"):
        gsettings(f"echo \"'{said}'\"")
        assert desktop.ask("POST", "/wallpaper") == (200, b"picture\n")
    gsettings("echo \"''\"")
    assert desktop.ask("POST", "/wallpaper")[0] == 404
    gsettings("echo 'out of memory' >&2; exit 1")
    status, body = desktop.ask("POST", "/wallpaper")
    assert status == 500 and b"out of memory" in body


async def test_a_checker_is_told_what_is_not_there(desktop: Desktop) -> None:
    """No such program or window is evidence, and OSWorld's own 0; what was not answered withholds the score."""
    desktop.execute("echo not a program > ~/text; mkdir -p ~/folder")
    failures: list[str] = []
    async with gateway(desktop, failures) as ask:
        for command in (["/home/user/made by the agent"], ["no-such"], ["/home/user/text"], ["/home/user/folder"]):
            status, answer = await ask("POST", "/execute", command=command)
            assert (status, answer["status"]) == (404, "error"), answer
            assert (await ask("POST", "/setup/launch", command=command))[0] == 404
        assert failures == []
        assert (await ask("POST", "/execute", command=["sleep", "30"], timeout=0.3))[0] == 500
        assert len(failures) == 1 and "timed out" in failures[0]


@pytest.fixture
def stopped(desktop: Desktop) -> Iterator[str]:
    """An application that does not answer; its process number."""
    for name in ("stopped", "running"):
        desktop.execute(f"echo x > ~/{name}.txt")
        desktop.ask("POST", "/setup/launch", {"command": ["mousepad", "--disable-server", f"/home/user/{name}.txt"]})
        wait_titles(desktop, lambda found, name=name: any(name in title for title in found))  # type: ignore[misc]
    number = desktop.execute(["pgrep", "-f", "mousepad.*stopped.txt"])["output"].strip()
    desktop.execute(["kill", "-STOP", number])
    yield number
    desktop.execute("pkill -CONT mousepad; pkill mousepad")


async def test_a_checker_gets_a_whole_tree_or_none(desktop: Desktop, stopped: str) -> None:
    """An agent gets what there is, with a word about what is missing."""
    failures: list[str] = []
    said = f"mousepad (process {stopped})"
    async with gateway(desktop, failures) as ask:
        status, answer = ask_json(desktop, "GET", "/accessibility")
        assert (status, answer["unanswered"]) == (200, [said])
        assert "running.txt" in answer["AT"] and "stopped.txt" not in answer["AT"]
        status, answer = await ask("GET", "/accessibility")
        assert status == 500 and f"{said} does not answer" in answer["message"], answer
        assert len(failures) == 1 and said in failures[0]
        # An application that is only busy is waited for, longer than an agent is.
        desktop.execute(f"(sleep 3; kill -CONT {stopped}) >/dev/null 2>&1 &")
        status, answer = await ask("GET", "/accessibility")
        assert (status, list(answer)) == (200, ["AT"]) and "stopped.txt" in answer["AT"]
        assert len(failures) == 1


async def test_a_checker_is_told_of_a_terminal_that_cannot_be_read(desktop: Desktop, stopped: str) -> None:
    """None there is null; and another program that hangs is no matter."""
    failures: list[str] = []
    async with gateway(desktop, failures) as ask:
        assert await ask("GET", "/terminal") == (200, {"output": None, "status": "success"})
        desktop.execute("cp /bin/sleep ~/gnome-terminal-; (exec ~/gnome-terminal- 60) >/dev/null 2>&1 &")
        status, answer = ask_json(desktop, "GET", "/terminal")
        assert (status, answer["output"], answer["unanswered"]) == (200, None, ["gnome-terminal-server"])
        assert failures == []
        status, answer = await ask("GET", "/terminal")
        assert status == 500 and "gnome-terminal-server does not answer" in answer["message"], answer
        assert len(failures) == 1
    desktop.execute("pkill gnome-terminal")
