"""What tests let listen in a desktop in the place of a browser or VLC. No test itself; runs beside `port_server.py`.

    browser_server.py cdp PORT URL...      as much of the DevTools protocol as a client needs to list pages
    browser_server.py torn PORT URL...     the same, but it breaks off once it is asked for a page's title
    browser_server.py vlc PORT STATE FILE  VLC's status page

Source: https://chromedevtools.github.io/devtools-protocol/ (Browser, Target, Page).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from port_server import Handler, Server

KIND, URLS = sys.argv[1], sys.argv[3:]
STATUS = """<?xml version="1.0" encoding="utf-8"?>
<root><state>{}</state>
<information><category name="meta"><info name="filename">{}</info></category></information></root>
"""
VERSION = {
    "protocolVersion": "1.3",
    "product": "Chrome/100.0.0.0",
    "revision": "1",
    "userAgent": "x",
    "jsVersion": "1",
}


class Browser(Handler):
    """One connection."""

    def do_GET(self) -> None:
        """Any request."""
        if KIND == "vlc":
            content = STATUS.format(*URLS).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        elif "Sec-WebSocket-Key" in self.headers:
            self.websocket()
        else:
            here = f"ws://{self.headers['Host']}/devtools/browser/B"
            self.reply({"Browser": "Chrome/100.0.0.0", "Protocol-Version": "1.3", "webSocketDebuggerUrl": here})

    def message(self, opcode: int, data: bytes) -> bool:
        """A call of the protocol."""
        call = json.loads(data)
        if KIND == "torn" and call["method"] in ("Runtime.evaluate", "Runtime.callFunctionOn"):
            return False
        self.world = call.get("params", {}).get("worldName", "")
        self.answer(call)
        return True

    def answer(self, call: dict[str, Any]) -> None:
        """One call, and what follows from it."""
        method, page = call["method"], int(call.get("sessionId", "S0")[1:])
        inside = {"sessionId": call["sessionId"]} if "sessionId" in call else {}
        frame = {"id": f"T{page}", "loaderId": "L", "url": URLS[page], "securityOrigin": "x", "mimeType": "text/html"}
        results: dict[str, dict[str, Any]] = {
            "Browser.getVersion": VERSION,
            "Page.getFrameTree": {"frameTree": {"frame": frame}},
            "Page.createIsolatedWorld": {"executionContextId": 2},
        }
        # No script runs here.
        failed = {"error": {"code": -32000, "message": "no script"}}
        told = failed if method.startswith("Runtime.call") else {"result": results.get(method, {})}
        self.send({"id": call["id"], **told, **inside})
        for event, params in self.events(method, frame["id"], attach=not inside):
            self.send({"method": event, "params": params, **inside})

    def events(self, method: str, frame: str, *, attach: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """What a call brings about, besides its reply."""
        if method == "Target.setAutoAttach" and attach:
            for number, url in enumerate(URLS):
                info = {"targetId": f"T{number}", "type": "page", "title": "", "url": url, "attached": True}
                target = {**info, "browserContextId": "C"}
                params = {"sessionId": f"S{number}", "targetInfo": target, "waitingForDebugger": False}
                yield "Target.attachedToTarget", params
        if method == "Page.setLifecycleEventsEnabled":
            for name in ("DOMContentLoaded", "load", "networkIdle"):
                yield "Page.lifecycleEvent", {"frameId": frame, "loaderId": "L", "name": name, "timestamp": 1}
        if method in ("Runtime.enable", "Page.createIsolatedWorld"):
            main = method == "Runtime.enable"
            data = {"isDefault": main, "type": "default" if main else "isolated", "frameId": frame}
            context = {"id": 1 if main else 2, "origin": "x", "uniqueId": "1" if main else "2", "auxData": data}
            name = "" if main else self.world
            yield "Runtime.executionContextCreated", {"context": {**context, "name": name}}

    def send(self, document: dict[str, Any]) -> None:
        """One message."""
        self.frame(0x80, 1, json.dumps(document).encode())


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[2])), Browser).serve_forever()
