"""What the steps about the browser's tabs send it, at a stand-in whose events are lost where nobody listens yet.

The real browser is in `test_applications.py` and `test_applications_accounts.py`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from drums_core.abc import CommandResult
from drums_core.testing import FakeStepContext
from drums_osworld.steps import browser
from drums_osworld.steps.chrome_open_tabs import ChromeOpenTabs

# In the place of the library that the image has. As in the real one, a page's events come to those who had an answer to
# `Page.enable` before it began.
WEBSOCKET = """
import json

class WebSocketException(Exception): pass
class WebSocketTimeoutException(WebSocketException): pass

class Connection:
    listens, waiting = False, []

    def settimeout(self, seconds): pass
    def close(self): pass

    def send(self, text):
        message = json.loads(text)
        failed = "absent" in message["params"].get("url", "")
        result = {"errorText": "net::ERR_FAILED"} if failed else {}
        self.waiting = [*self.waiting, {"id": message["id"], "method": "", "result": result, "to": message["method"]}]
        if message["method"] == "Page.navigate" and self.listens and not failed:
            self.waiting.append({"method": "Page.loadEventFired"})

    def recv(self):
        if not self.waiting:
            raise WebSocketTimeoutException("timed out")
        message = self.waiting.pop(0)
        self.listens |= message.get("to") == "Page.enable"
        return json.dumps(message)

def create_connection(*_, **__):
    return Connection()
"""
TARGET = {"id": "A", "type": "page", "url": "about:blank"}


class Handler(BaseHTTPRequestHandler):
    """Tells of one page, which is gone once it is closed."""

    closed = 0

    def do_GET(self) -> None:
        """Any request."""
        if self.path.startswith("/json/close"):
            type(self).closed += 1
        answer: Any = TARGET if "/new" in self.path else [] if type(self).closed else [TARGET]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing."""


@attrs.define
class Here(FakeStepContext):
    """A context whose commands run on this machine, with the stand-in's library."""

    library: Path = attrs.field(kw_only=True)

    async def execute(self, command: Any, *, shell: bool = False, timeout_s: float = 120.0) -> CommandResult:
        """Run it."""
        done = await trio.run_process(
            [sys.executable, *command[1:]],
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env={"PYTHONPATH": str(self.library)},
        )
        return CommandResult(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    (tmp_path / "websocket.py").write_text(WEBSOCKET)
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {})) as server:
        monkeypatch.setattr(browser, "PORT", server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield Here(library=tmp_path)
        server.shutdown()
        thread.join()


async def opened(context: Here, *urls: str) -> list[str]:
    step = ChromeOpenTabs()
    await step.run(context, step.parse({"urls_to_open": list(urls)}))
    return context.notes


async def test_a_page_that_is_fast_is_not_missed(context: Here) -> None:
    """One that does not load is told."""
    failed = "chrome_open_tabs: 'http://absent.example' did not load: net::ERR_FAILED"
    assert await opened(context, "http://a.example", "http://absent.example") == [failed]


async def test_one_that_is_missed_is_seen(context: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded before the browser has answered that it tells of it, as it once was."""
    right = 'self.call("Page.enable", until)'
    wrong = 'self.socket.send(json.dumps({"id": -1, "method": "Page.enable", "params": {}}))'
    assert right in browser._PRELUDE
    monkeypatch.setattr(browser, "_PRELUDE", browser._PRELUDE.replace(right, wrong))
    (note,) = await opened(context, "http://a.example")
    assert "did not load within" in note
