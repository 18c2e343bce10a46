"""Every getter of OSWorld, unmodified, in the worker, with a desktop that cannot be asked: no score, ever. As root.

Getters take what they cannot reach for an answer nearly everywhere (an empty list, a default, None), which a metric
makes a 0 of. The tables name each getter that the installed package has; one that comes with a later version is not
tried until it is in them, and a test says so.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from requires import requires
from test_osworld_checker import Guest, task

from drums.errors import CheckerError, GuestError, PortError
from drums_core.abc import CheckContext
from drums_core.config import HostConfig
from drums_core.guest_client import Response
from drums_core.guest_gateway import serve_guest
from drums_core.port_gateway import GRADED_PORTS, PortGateway
from drums_osworld.checker import OSWorldChecker
from drums_osworld.symbols import locate, scan

pytestmark = requires("root")

# These look at nothing of the desktop: the task, files on the host, an account, the checker's own clock or network. And
# `replay` types into it, for another getter: an evaluator's entry for it would be no list of actions.
ELSEWHERE = {
    "cache_file",
    "cloud_file",
    "conference_city_in_order",
    "googledrive_file",
    "replay",
    "rule",
    "rule_relativeTime",
    "time_diff_range",
    "timezone_from_config",
    "timezone_from_ip",
}
DEST: dict[str, Any] = {"dest": "x"}
SLIDE = {"ppt_file_path": "/home/user/a.pptx", "slide_index": 0, **DEST}
# What each of the others is asked: its type -> its configuration.
OF_THE_GUEST: dict[str, dict[str, Any]] = {
    "accessibility_tree": {},
    "active_tab_url_parse": {"parse_keys": ["q"]},
    "active_url_from_accessTree": {},
    "audio_in_slide": SLIDE,
    "background_image_in_slide": SLIDE,
    "bookmarks": {},
    "chrome_font_size": {},
    "chrome_language": {},
    "content_from_vm_file": {"path": "/home/user/a.xlsx", "file_type": "xlsx", "file_content": "last_row"},
    "cookie_data": DEST,
    "data_delete_automacally": {},
    "default_search_engine": {},
    "default_video_player": {},
    "enable_do_not_track": {},
    "enable_enhanced_safety_browsing": {},
    "enable_safe_browsing": {},
    "enabled_experiments": {},
    "extensions_installed_from_shop": {},
    "find_installed_extension_name": {},
    "find_unpacked_extension_path": {},
    "gimp_config_file": {"file_name": "gimprc", **DEST},
    "history": DEST,
    "list_directory": {"path": "/home/user"},
    "macys_product_url_parse": {"parse_keys": []},
    "new_startup_page": {},
    "profile_name": {},
    "shortcuts_on_desktop": {},
    "url_dashPart": {"partIndex": 1, "returnType": "string"},
    "url_path_parse": {"parse_keys": []},
    "vlc_config": DEST,
    "vm_command_error": {"command": "true"},
    "vm_command_line": {"command": "true"},
    "vm_file": {"path": "/home/user/a", **DEST},
    "vm_screen_size": {},
    "vm_terminal_output": {},
    "vm_wallpaper": DEST,
    "vm_window_size": {"app_class_name": "vlc"},
    "vscode_config": {"vscode_extension_command": "x", "path": "/home/user/a", **DEST},
}
# These ask the browser or VLC, some of them the guest server besides.
OF_A_PORT: dict[str, dict[str, Any]] = {
    "active_tab_html_parse": {"category": "class", "class_singleObject": {}},
    "active_tab_info": {},
    "chrome_saved_address": {},
    "gotoRecreationPage_and_get_html_content": {"selector": "class", "class": "x"},
    "info_from_website": {"url": "about:blank", "infos": [], "backups": "x"},
    "number_of_search_results": {},
    "open_tabs_info": {},
    "page_info": {"url": "about:blank"},
    "pdf_from_url": {"path": "about:blank", **DEST},
    "vlc_playing_info": DEST,
}
SOME = ("open_tabs_info", "active_tab_info", "vlc_playing_info")
# Before it asks the browser, it asks a page of the web from the checker's own machine, which a worker cannot.
ASKS_THE_WEB = "gotoRecreationPage_and_get_html_content"
TREE = (
    '<desktop-frame><application name="Google Chrome"><entry name="Address and search bar">example.org</entry>'
    "</application></desktop-frame>"
)


def test_the_tables_hold_every_getter() -> None:
    """Of the installed package, as its initialiser exports them and as its modules define them."""
    known = {name.removeprefix("get_") for name in scan(locate(None)[0]).getters if name.startswith("get_")}
    assert known == {*ELSEWHERE, *OF_THE_GUEST, *OF_A_PORT}
    assert len(known) == len(ELSEWHERE) + len(OF_THE_GUEST) + len(OF_A_PORT)


class WellGuest(Guest):
    """A desktop whose guest server is well, and shows a browser."""

    def _reply(self, path: bytes, body: bytes) -> tuple[int, bytes]:
        if path == b"/accessibility":
            return 200, json.dumps({"AT": TREE}).encode()
        return (200, b"launched") if path == b"/setup/launch" else super()._reply(path, body)


def quiet(_: Any) -> tuple[int, Any]:
    return 200, {"status": "success", "output": "", "error": "", "returncode": 0}


@asynccontextmanager
async def refuses(port: int) -> AsyncIterator[trio.SocketStream]:
    """Nothing listens there."""
    raise PortError(f"port {port} of the desktop takes no connection: Connection refused", port=port)
    yield


def answers(reply: bytes) -> Callable[[int], Any]:
    """Something takes the connection, says this at the first word, and ends it."""

    @asynccontextmanager
    async def connect(port: int) -> AsyncIterator[trio.SocketStream]:
        ours, theirs = trio.socket.socketpair()

        async def program() -> None:
            async with trio.SocketStream(theirs) as stream:
                await stream.receive_some()
                await stream.send_all(reply)

        async with trio.open_nursery() as nursery, trio.SocketStream(ours) as stream:
            nursery.start_soon(program)
            yield stream
            nursery.cancel_scope.cancel()

    return connect


async def silent(method: str, target: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()) -> Response:
    raise GuestError("the guest server did not answer")


def document(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluator that any answer of the getter gives a score."""
    return {
        "func": "exact_match",
        "result": {"type": kind, **config},
        "expected": {"type": "rule", "rules": {"expected": "x"}},
    }


async def outcome(
    kind: str, config: Mapping[str, Any], scratch: Path, *, connect: Any, guest: Guest | None
) -> float | str:
    """The score, or why there is none."""
    failures: list[str] = []
    serve = guest.serve if guest else partial(serve_guest, silent, failures=failures)
    gateway = PortGateway(connect, failures, [])
    await trio.to_thread.run_sync(scratch.mkdir)

    async def no_steps(_: Any) -> None:
        raise AssertionError("there are none")

    context = CheckContext(
        task(document(kind, config)),
        None,
        serve,
        failures,
        no_steps,
        scratch,
        serve_ports={port: partial(gateway.serve, port) for port in GRADED_PORTS},
    )
    try:
        return await OSWorldChecker(HostConfig(checker_timeout_s=240, files_offline=True)).check(context)
    except CheckerError as e:
        return e.message


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], float | str]:
    """All of them, several at a time: they mostly sleep, and try again."""
    found: dict[tuple[str, str], float | str] = {}
    scratch = tmp_path_factory.mktemp("checks")
    ways: dict[str, tuple[Any, Guest | None]] = {
        "silent": (refuses, None),
        "refuses": (refuses, WellGuest(quiet)),
        "garbage": (answers(b"SSH-2.0-OpenSSH_9.2\r\n"), WellGuest(quiet)),
        "another program": (answers(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), WellGuest(quiet)),
    }
    asked = [("silent", kind) for kind in {**OF_THE_GUEST, **OF_A_PORT}] + [("refuses", kind) for kind in OF_A_PORT]
    asked += [(way, kind) for way in ("garbage", "another program") for kind in SOME]

    async def one(way: str, kind: str, limit: trio.CapacityLimiter) -> None:
        connect, guest = ways[way]
        config = {**OF_THE_GUEST, **OF_A_PORT}[kind]
        async with limit:
            place = scratch / f"{len(found)}-{way}-{kind}"
            found[way, kind] = await outcome(kind, config, place, connect=connect, guest=guest)

    async def main() -> None:
        limit = trio.CapacityLimiter(24)
        async with trio.open_nursery() as nursery:
            for way, kind in reversed(asked):
                nursery.start_soon(one, way, kind, limit)

    trio.run(main)
    return found


@pytest.mark.parametrize("kind", [*OF_THE_GUEST, *OF_A_PORT])
def test_a_desktop_that_is_silent_gives_no_score(outcomes: Mapping[tuple[str, str], Any], kind: str) -> None:
    wanted = "www.google.com" if kind == ASKS_THE_WEB else "could not ask the desktop"
    assert wanted in outcomes["silent", kind]


@pytest.mark.parametrize("kind", OF_A_PORT)
def test_a_port_that_takes_no_connection_gives_no_score(outcomes: Mapping[tuple[str, str], Any], kind: str) -> None:
    """And it is the port that is named: the getter came so far."""
    wanted = "could not ask the desktop: port 8080" if kind == "vlc_playing_info" else "desktop: port 9222"
    assert ("www.google.com" if kind == ASKS_THE_WEB else wanted) in outcomes["refuses", kind]


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("way", ["garbage", "another program"])
def test_what_answers_there_as_no_browser_does_gives_no_score(
    outcomes: Mapping[tuple[str, str], Any], kind: str, way: str
) -> None:
    assert isinstance(outcomes[way, kind], str), outcomes[way, kind]
