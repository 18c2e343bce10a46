"""The desktop's browser by its debugging port, for the steps about its tabs and pages.

What speaks to it runs in the desktop, as the user: what answers on the port is of the desktop's making, and nothing of
the host reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from drums.errors import SetupFailed
from drums_core.abc import CommandResult, StepContext

# Where a task's own `socat` step makes the browser's port 1337 reachable; OSWorld uses no other.
PORT = 9222
LIMIT_S = 75.0  # until the browser answers, as in OSWorld
LOAD_LIMIT_S = 60.0  # for one page, as in OSWorld; later is noted
_SHOWN = 500

# What every script begins with. argv: port, seconds until it must answer, seconds for one page
# or one answer, and the script's own.
_PRELUDE = r"""
import json, sys, time, urllib.request
import websocket

port, answer_s, load_s = sys.argv[1:4]
top = f"http://127.0.0.1:{port}/json"


def ask(path="", method="GET"):
    with urllib.request.urlopen(urllib.request.Request(top + path, method=method), timeout=10) as reply:
        return json.load(reply)


def pages():
    return [target for target in ask() if target["type"] == "page"]


class Tab:
    def __init__(self, target):
        address = f"ws://127.0.0.1:{port}/devtools/page/{target['id']}"
        self.socket = websocket.create_connection(address, suppress_origin=True, timeout=float(load_s))
        self.number = self.loads = 0

    def receive(self, until):
        self.socket.settimeout(max(0.1, until - time.monotonic()))
        message = json.loads(self.socket.recv())
        self.loads += message.get("method") == "Page.loadEventFired"
        return message

    def call(self, method, until=None, **params):
        until = until or time.monotonic() + float(load_s)
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = self.receive(until)
            if message.get("id") == self.number:
                return message.get("result", {})

    def wait_for_load(self, before, until):
        while self.loads == before:
            self.receive(until)

    def load(self, url):
        # Answered before anything is loaded: else a page that is fast is there before its event is listened for.
        until = time.monotonic() + float(load_s)
        self.call("Page.enable", until)
        before = self.loads
        failure = self.call("Page.navigate", until, url=url).get("errorText")
        if failure:
            print(f"{url!r} did not load: {failure}")
        else:
            self.wait_for_load(before, until)


until = time.monotonic() + float(answer_s)
while True:
    try:
        found = pages()
        break
    except (OSError, ValueError) as error:
        if time.monotonic() > until:
            sys.exit(f"the browser does not answer on port {port}: {error}")
        time.sleep(0.5)
"""

# Its own arguments: what to do, and URLs as JSON. Prints notes.
_TABS = r"""
import re
from urllib.parse import urlsplit

action, urls = sys.argv[4:]


def close(target):
    urllib.request.urlopen(f"{top}/close/{target['id']}", timeout=10).close()
    # It is listed until it is gone; a second look must not find it again.
    until = time.monotonic() + 10
    while any(other["id"] == target["id"] for other in pages()) and time.monotonic() < until:
        time.sleep(0.05)


def same(one, other):
    parts = []
    for url in (one, other):
        split = urlsplit(url if re.match(r"[a-zA-Z][\w+.-]*://", url) else "http://" + url)
        host = split.netloc.lower().removeprefix("www.")
        parts.append((split.scheme.lower(), host, split.path.rstrip("/") or "", split.query, split.fragment))
    return parts[0] == parts[1]


for number, url in enumerate(json.loads(urls)):
    if action == "open":
        target = ask("/new?about:blank", "PUT")
        try:
            tab = Tab(target)
            tab.load(url)
            tab.socket.close()
        except (OSError, websocket.WebSocketException) as error:
            print(f"{url!r} did not load within {load_s} s: {error}")
        if number == 0 and found:
            close(found[-1])
    else:
        matching = [target for target in pages() if same(target["url"], url)]
        if matching:
            close(matching[0])
        else:
            print(f"no tab shows {url!r}")
"""


async def run_in_browser(context: StepContext, script: str, *arguments: str, limit_s: float) -> CommandResult:
    """Run a script of Python in the desktop, behind `_PRELUDE`, which waits until the browser answers.

    Args:
        script: what it does then.
        arguments: its own, from `sys.argv[4]` on.
        limit_s: seconds that it may take once the browser answers.

    Raises:
        GuestError: the desktop could not be asked.
    """
    limits = [str(PORT), str(LIMIT_S), str(LOAD_LIMIT_S)]
    command = ["/usr/bin/python3", "-c", _PRELUDE + script, *limits, *arguments]
    return await context.execute(command, timeout_s=LIMIT_S + limit_s + 30)


async def tell_browser(context: StepContext, action: str, urls: Sequence[str]) -> None:
    """Open or close tabs.

    Args:
        action: `open` or `close`.

    Raises:
        SetupFailed: the browser does not answer; what only did not load, or was not open, is noted.
        GuestError: the desktop could not be asked.
    """
    result = await run_in_browser(context, _TABS, action, json.dumps(list(urls)), limit_s=LOAD_LIMIT_S * len(urls))
    if result.returncode != 0:
        raise SetupFailed(
            result.error.strip()[-_SHOWN:] or f"tabs: ended with code {result.returncode}", output=result.error[-2000:]
        )
    for line in result.output.splitlines()[: len(urls)]:
        context.note(f"chrome_{action}_tabs: {line[:_SHOWN]}")
