"""Routes of the guest server about the wallpaper, recordings, downloads and verified commands, on a throw-away desktop.

What they do where all of their programs are is in `test_osworld_controllers.py`; here is what they refuse.
"""

from __future__ import annotations

import json
from typing import Any

from test_guest_server import Desktop, ask_json, desktop, fetch, titles

__all__ = ["desktop"]  # the fixture


def refusal(desktop: Desktop, method: str, target: str, **document: Any) -> tuple[int, str]:
    """A refused request's status and message."""
    status, body = desktop.ask(method, target, document)
    return status, str(json.loads(body)["message"])


def test_a_command_is_verified_by_another(desktop: Desktop) -> None:
    late = "(sleep 1; touch ~/late) >/dev/null 2>&1 & echo begun"
    status, answer = ask_json(
        desktop,
        "POST",
        "/execute_with_verification",
        command=late,
        shell=True,
        verification={"command_success": "test -e ~/late"},
        max_wait_time=20,
        check_interval=0.1,
    )
    assert (status, answer["status"], answer["output"]) == (200, "success", "begun\n")
    assert answer["verification"] == "passed" and answer["wait_time"] >= 0


def test_a_command_is_verified_by_a_window(desktop: Desktop) -> None:
    command = "xterm -T 'seen by all' -e sleep 1000 >/dev/null 2>&1 &"
    status, answer = ask_json(
        desktop,
        "POST",
        "/setup/execute_with_verification",
        command=command,
        shell=True,
        verification={"window_exists": "Seen by ALL"},
        max_wait_time=30,
        check_interval=0.1,
    )
    assert status == 200, answer
    assert "seen by all" in titles(desktop)
    desktop.execute("pkill -f '[s]een by all'")


def test_a_verification_that_never_comes_is_an_error(desktop: Desktop) -> None:
    for verification in ({"command_success": "false"}, {"window_exists": "no such window"}):
        status, answer = ask_json(
            desktop,
            "POST",
            "/execute_with_verification",
            command=["echo", "x"],
            verification=verification,
            max_wait_time=0.3,
            check_interval=0.1,
        )
        assert (status, answer["status"], answer["output"]) == (500, "verification_failed", "x\n")
        assert (answer["verification"], answer["wait_time"]) == ("failed", 0.3)
    assert refusal(desktop, "POST", "/execute_with_verification", command=["true"], verification=[])[0] == 400
    assert refusal(desktop, "POST", "/execute_with_verification", command=["true"], max_wait_time="x")[0] == 400


def test_a_recording_needs_a_recorder_and_an_end_its_begin(desktop: Desktop) -> None:
    status, message = refusal(desktop, "POST", "/start_recording")
    assert status == 500 and "ffmpeg is not installed" in message
    assert refusal(desktop, "POST", "/end_recording") == (400, "No recording in progress to stop.")


def test_a_number_that_the_agent_wrote_ends_nothing_of_others(desktop: Desktop) -> None:
    """The recorder's number is the user's to write, and is acted on as the user."""
    server = desktop.execute("pgrep -o -f guest/server.py")["output"].strip()
    desktop.execute(f"echo {server} > /run/user/1000/recording.pid")
    assert refusal(desktop, "POST", "/end_recording")[0] == 400
    assert desktop.execute("pgrep -o -f guest/server.py")["output"].strip() == server
    desktop.execute("rm /run/user/1000/recording.pid")


def test_a_wallpaper_that_is_not_there(desktop: Desktop) -> None:
    assert refusal(desktop, "POST", "/wallpaper")[0] == 404
    assert refusal(desktop, "POST", "/setup/change_wallpaper", path="/no/such") == (404, "File not found: /no/such")
    assert refusal(desktop, "POST", "/setup/change_wallpaper")[0] == 400


def test_the_desktop_fetches_a_file_itself(desktop: Desktop) -> None:
    serve = (
        "mkdir -p ~/www && echo content > ~/www/file && cd ~/www && exec python3 -m http.server 8123 --bind 127.0.0.1"
    )
    desktop.ask("POST", "/setup/launch", {"command": serve, "shell": True})
    desktop.execute("for i in $(seq 100); do curl -s 127.0.0.1:8123/file >/dev/null && break; sleep 0.1; done")
    target = {"url": "http://127.0.0.1:8123/file", "path": "~/new/copy of it"}
    assert desktop.ask("POST", "/setup/download_file", target)[0] == 200
    assert fetch(desktop, "/home/user/new/copy of it") == (200, b"content\n")
    # What is there stays when the next one cannot be had, and no other kind of URL is followed.
    for url in ("http://127.0.0.1:8123/none", "file:///etc/passwd"):
        status, message = refusal(desktop, "POST", "/setup/download_file", **(target | {"url": url}))
        assert status == 500 and url in message
    assert fetch(desktop, "/home/user/new/copy of it") == (200, b"content\n")
    assert refusal(desktop, "POST", "/setup/download_file", url="http://127.0.0.1:8123/file")[0] == 400
    desktop.execute("pkill -f '[h]ttp.server 8123'")
