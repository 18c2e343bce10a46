"""OSWorld's own controllers against a desktop of the image `osworld`; and the steps about tabs, on another."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from desktops import Played, judged, make_task, play, run
from requires import requires

from drums_core.guest_gateway import serve_guest
from drums_core.host import Host
from drums_core.model import SetupStep

pytestmark = requires("root", "criu", "osworld")

CLIENT = Path(__file__).with_name("osworld_client.py")
PAGES = 'for i in one two three; do printf "<title>Page $i</title>" > ~/$i.html; done'
OWN = "file:///home/user/{}.html"


def step(kind: str, **parameters: Any) -> SetupStep:
    return SetupStep(kind, parameters)


def controllers(folder: Path) -> Any:
    async def scenario(host: Host) -> Any:
        failures: list[str] = []
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        async with await host.create(image="osworld") as slot, trio.open_nursery() as nursery:
            nursery.start_soon(serve_guest, slot.guest.request, listener.detach(), failures)
            command = [sys.executable, str(CLIENT), str(port), str(folder)]
            with trio.fail_after(300):
                done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
            nursery.cancel_scope.cancel()
            return {
                "code": done.returncode,
                "error": done.stderr.decode()[-3000:],
                "results": json.loads(done.stdout or b"{}"),
                "failures": failures,
            }

    return scenario


async def tabs(host: Host) -> Any:
    """What the browser shows after the steps of a task about it."""
    task = make_task(
        step("execute", command=PAGES, shell=True),
        step(
            "update_browse_history",
            history=[{"url": "https://a.example/", "title": "A", "visit_time_from_now_in_seconds": 60}],
        ),
        step("launch", command=["google-chrome", "--remote-debugging-port=1337"]),
        step("launch", command=["socat", "tcp-listen:9222,fork", "tcp:localhost:1337"]),
        step("chrome_open_tabs", urls_to_open=[OWN.format(x) for x in ("one", "two", "three", "none")]),
        step("chrome_close_tabs", urls_to_close=[OWN.format("two"), OWN.format("two")]),
    )
    async with await host.create(task, image="osworld") as slot:
        pages = await run(slot, "curl -s localhost:9222/json | jq -r '.[] | select(.type==\"page\") | .title' | sort")
        visits = await run(
            slot,
            "cp ~/.config/google-chrome/Default/History /tmp/h && "
            "sqlite3 /tmp/h 'select url, title, visit_count from urls where url like \"%a.example%\"'",
        )
        notes = list(slot.episode.notes)
        return {"pages": pages.split("\n"), "visits": visits, "notes": notes, "outcome": await judged(slot)}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    pytest.importorskip("requests_toolbelt")
    return play({"controllers": controllers(tmp_path_factory.mktemp("osworld")), "tabs": tabs})


def test_osworlds_controllers_drive_a_desktop(played: Played) -> None:
    found = played["controllers"]
    assert found["code"] == 0, found["error"]
    results = found["results"]
    assert results["setup"] is True
    assert results["python"]["output"] == "700 500\n"
    assert results["script"]["output"] == "42\n"
    failing, slow = results["failing script"], results["slow script"]
    assert (failing["status"], failing["output"], failing["return_code"]) == ("error", "a\n", 7)
    assert failing["error"] == "Process exited with code 7" and failing["message"].startswith("a\n")
    # Told by the server, and so not run again: without `error` in the answer the controller would.
    assert (slow["status"], slow["error"], results["slow scripts"]) == ("error", "TimeoutExpired", 1)
    assert (results["bash"]["output"], results["bash"]["returncode"]) == ("960\n", 3)
    assert "typed by the controller" in results["terminal"].splitlines()[1]
    below = {"type": "directory", "name": "below", "children": [{"type": "file", "name": "leaf"}]}
    assert results["tree"] == {"type": "directory", "name": "tree", "children": [below]}
    assert results["screenshot"].endswith("of b'\\x89PNG'")
    assert results["file"] == "20 bytes of b'writ'" and results["no file"] is None
    assert results["platform"] == "Linux" and results["screen"] == {"width": 1920, "height": 1080}
    assert results["window"]["width"] > 400 and results["desktop"] == "/home/user/Desktop"
    assert results["wallpaper"].endswith("of b'\\x89PNG'")
    assert results["accessibility"] == ["gnome-shell", "gnome-terminal-server"]
    assert results["film"] == "ftyp" and results["kept"]
    assert len(found["failures"]) == 1 and "timed out after 1 seconds" in found["failures"][0]


def test_steps_about_tabs(played: Played) -> None:
    """Opened and closed; what was not there is noted. The first, empty tab is closed."""
    found = played["tabs"]
    assert [x for x in found["pages"] if x] == ["file:///home/user/none.html", "Page one", "Page three"]
    assert found["visits"] == "https://a.example/|A|1\n"
    assert [x.partition(":")[0] for x in found["notes"]] == ["chrome_open_tabs", "chrome_close_tabs"]
    assert "ERR_FILE_NOT_FOUND" in found["notes"][0] and "no tab shows" in found["notes"][1]
    assert found["outcome"].verdict == "valid"


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
