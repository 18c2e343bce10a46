"""A desktop's ports over HTTP: one request made anew to what listens there, and the parts of its reply that are safe.

Whoever answers there may be the agent. It learns nothing of the client but what the fields in `_PASSED_IN` say; what it
answers is limited in size and time, is not followed anywhere, and cannot send a client with its token elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import h11
import trio
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from drums.errors import ConfigError, PortError, SlotBusy
from drums_core.daemon.answers import Answer
from drums_core.ports import PortClosed
from drums_core.slot import Slot

HEAD_LIMIT_BYTES = 32 << 10
REPLY_LIMIT_BYTES = 16 << 20
REPLY_LIMIT_S = 60.0
AUTHORIZATION = "x-drums-port-authorization"
"""What a client sends for the `Authorization` of the program in the desktop: its own bears the daemon's token."""
MARK = "X-Drums-Port"
"""Field of a reply that the desktop made, and not the daemon: its value is the port."""

_PASSED_IN = ("accept", "accept-language", "content-type", "if-modified-since", "if-none-match", "range", "user-agent")
_PASSED_OUT = (
    "accept-ranges",
    "content-disposition",
    "content-language",
    "content-range",
    "content-type",
    "etag",
    "last-modified",
)
_BEHIND = re.compile(rb"/v1/slots/[^/]+/ports/[^/]+(/.*)", re.DOTALL)
_HOST = re.compile(r"[A-Za-z0-9._-]+(:[0-9]+)?|\[[0-9a-fA-F:.]+\](:[0-9]+)?")
_DEBUGGER_URL = re.compile(r"wss?://[^/?#]*(/devtools/[A-Za-z0-9/_.-]+)")
_DEBUGGER = "webSocketDebuggerUrl"


def _malformed(path: str, message: str) -> ConfigError:
    return ConfigError(message, path=path, errors=[{"path": path, "message": message}])


def port_of(text: str) -> int:
    """A port as the path names it.

    Raises:
        ConfigError: it is no number from 1 to 65535.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,4}", text, re.ASCII) or int(text) > 65535:
        raise _malformed("$path.port", f"the port is {text[:20]!r}, expected a number from 1 to 65535")
    return int(text)


def target_of(request: HTTPConnection) -> str:
    """What is asked of the program in the desktop: the request's path behind the port, with its query, as it was sent.

    Raises:
        ConfigError: it is nothing that a request can ask for.
    """
    match = _BEHIND.fullmatch(request.scope["raw_path"])
    query = request.scope["query_string"]
    target = b"" if match is None else match[1] + (b"?" + query if query else b"")
    if not re.fullmatch(rb"/[!-~]*", target):
        raise _malformed("$path.path", "the path behind the port is malformed, expected percent-encoded ASCII")
    return target.decode("ascii")


def fields_for_desktop(headers: Headers) -> list[tuple[str, str]]:
    """The header fields that go on into the desktop; none bears the daemon's token."""
    found = [(name, headers[name]) for name in _PASSED_IN if name in headers]
    if AUTHORIZATION in headers:
        found.append(("authorization", headers[AUTHORIZATION]))
    return found


async def pass_on(slot: Slot, port: int, request: HTTPConnection, method: str, body: bytes) -> Answer:
    """Make a request to a port of the desktop, and its reply an answer.

    Raises:
        PortNotAllowed, PortError: as `Slot.connect_port`; the reply is too large, too late, or no HTTP.
        SlotBusy: an operation began that ends connections.
    """
    target = target_of(request)
    lines = [("Host", f"localhost:{port}"), ("Connection", "close"), *fields_for_desktop(request.headers)]
    if body or method in ("PUT", "POST"):
        lines.append(("Content-Length", str(len(body))))
    try:
        asked = h11.Request(method=method, target=target, headers=lines)
    except h11.LocalProtocolError as e:
        raise _malformed("$header", f"the request cannot be passed on: {e}") from e
    try:
        async with slot.connect_port(port) as stream:
            with trio.fail_after(REPLY_LIMIT_S):
                reply, content = await _exchange(stream, asked, body)
    except trio.TooSlowError:
        raise PortError(f"port {port} of the desktop gave no whole reply in {REPLY_LIMIT_S:g} s", port=port) from None
    except (OSError, trio.BrokenResourceError) as e:
        raise PortError(f"port {port} of the desktop broke the connection off: {e}", port=port) from e
    except h11.RemoteProtocolError as e:
        limits = f"allowed are {HEAD_LIMIT_BYTES} bytes of header and {REPLY_LIMIT_BYTES} bytes of body"
        raise PortError(f"port {port} of the desktop did not reply in HTTP: {e}; {limits}", port=port) from e
    except PortClosed as e:
        raise SlotBusy(f"the request to port {port} was cut off: {e}", hint="try again when that is done") from e
    if not 200 <= reply.status_code < 600:
        raise PortError(f"port {port} of the desktop replied with status {reply.status_code}", port=port)
    if re.fullmatch(r"/json(/[^?]*)?(\?.*)?", target):
        content = await trio.to_thread.run_sync(partial(with_our_urls, content, debugger_base(request, slot, port)))
    return Answer(reply.status_code, content, "application/octet-stream", _fields_for_client(reply.headers, port))


async def _exchange(stream: trio.SocketStream, request: h11.Request, body: bytes) -> tuple[h11.Response, bytes]:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT_BYTES)
    parts = (request, h11.Data(data=body), h11.EndOfMessage()) if body else (request, h11.EndOfMessage())
    await stream.send_all(b"".join(connection.send(part) or b"" for part in parts))
    reply: h11.Response | None = None
    received = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(1 << 16))
        elif isinstance(event, h11.Response):
            reply = event
        elif isinstance(event, h11.Data):
            received += event.data
            if len(received) > REPLY_LIMIT_BYTES:
                raise h11.RemoteProtocolError(f"the body has more than {REPLY_LIMIT_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage) and reply is not None:
            return reply, bytes(received)
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("the connection ended without a reply")


def _fields_for_client(fields: Sequence[tuple[bytes, bytes]], port: int) -> Mapping[str, str]:
    """The reply's harmless fields. A browser that is led there runs nothing of it as the daemon's own page."""
    found = {k.decode("latin-1"): v.decode("latin-1") for k, v in fields}
    return {
        **{name: found[name] for name in _PASSED_OUT if name in found},
        "Content-Security-Policy": "sandbox",
        "X-Content-Type-Options": "nosniff",
        MARK: str(port),
    }


# --- the URLs in a browser's listing


def debugger_base(request: HTTPConnection, slot: Slot, port: int) -> str:
    """What the websockets of a port begin with, as this client reaches the daemon (or the TLS in front of it)."""
    host = request.headers.get("host", "")
    secure = request.headers.get("x-forwarded-proto", "").strip().lower() == "https"
    where = host if _HOST.fullmatch(host) else "127.0.0.1"
    return f"{'wss' if secure else 'ws'}://{where}/v1/slots/{slot.id}/ports/{port}"


def with_our_urls(content: bytes, base: str) -> bytes:
    """A reply to `/json…` with each `webSocketDebuggerUrl` leading through the daemon; one that names no target is left
    out, since a client would go there with its token. What is no JSON stays as it is. Blocks.

    Raises:
        PortError: what a client's parser may read and this one does not.
    """
    text = content.decode("utf-8", "replace").removeprefix("\ufeff")
    try:
        document = json.loads(text)
        for entry in document if isinstance(document, list) else [document]:
            if isinstance(entry, dict) and _DEBUGGER in entry:
                _lead_through(entry, base)
        return json.dumps(document, indent=3).encode()
    except json.JSONDecodeError:
        return content
    except (ValueError, RecursionError) as e:
        raise PortError(f"the desktop's listing is no JSON that can be passed on: {e}") from e


def _lead_through(entry: dict[str, Any], base: str) -> None:
    match = _DEBUGGER_URL.fullmatch(str(entry.pop(_DEBUGGER)))
    if match is not None:
        entry[_DEBUGGER] = base + match[1]
