"""Serving a desktop's guest server to a checker's worker, which has no other network.

Every request is made anew with a signature, and only what its proof covers comes back: status, content type and body.
What could not be asked is noted here, outside the worker: OSWorld's code swallows transport errors into zeros, and a
score must be withheld then. The guest server tells by its status: what begins with 5 is that, what begins with 4 (no
such file, program or window) is a fact about the desktop, which the checker sees.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

import h11
import trio

from drums.errors import CheckerError, GuestError
from drums_core.guest_client import Response

MAX_REQUEST_BYTES = 64 << 20
# An agent gets what there is of these, a checker all or nothing: a program that is only busy would be no evidence.
_WHOLE = {x: f"{x}?whole" for x in ("/accessibility", "/terminal")}


LIVING = "X-Drums-Living"
"""Request field: `everything` says that the request needs the agent's applications alive, where a copy is asked."""


class AskGuest(Protocol):
    """`GuestClient.request`, of a desktop or of the copy of one."""

    async def __call__(
        self, method: str, target: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()
    ) -> Response:
        """The reply; raises `GuestError` when there is none."""


async def serve_guest(ask: AskGuest, listening_fd: int, failures: list[str], hostile: list[str] | None = None) -> None:
    """Serve the guest server on a listening TCP socket until cancelled.

    Args:
        ask: asks the desktop's guest server.
        listening_fd: the socket, taken over and closed here.
        hostile: gets the lines of `failures` that tell of what only a program in the desktop can have made so.
        failures: gets a line for every request that the desktop did not answer, or answered with a server error.
    """
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=listening_fd)))

    async def handle(stream: trio.SocketStream) -> None:
        try:
            async with stream:
                await _one_request(ask, stream, failures, [] if hostile is None else hostile)
        except (OSError, trio.BrokenResourceError, h11.ProtocolError) as e:
            # The worker went away or spoke nonsense: its own affair, and it has no answer to misread.
            failures.append(f"a request of the checker broke off: {e}")

    async with listener:
        await trio.serve_listeners(handle, [listener])


async def _one_request(ask: AskGuest, stream: trio.SocketStream, failures: list[str], hostile: list[str]) -> None:
    connection = h11.Connection(h11.SERVER)
    request: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                go_on = connection.send(h11.InformationalResponse(status_code=100, headers=[]))
                await stream.send_all(go_on or b"")
            connection.receive_data(await stream.receive_some(1 << 16))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_REQUEST_BYTES:
                raise h11.LocalProtocolError("request too large")
        elif isinstance(event, h11.EndOfMessage):
            break
        else:
            return  # closed without a request
    assert request is not None
    method, target = request.method.decode(), request.target.decode("ascii", "replace")
    # The guest server reads no other field but the body's length and its own, which the client makes.
    passed_on = {name.lower().encode(): name for name in ("Content-Type", LIVING)}
    headers = [(passed_on[k], v.decode("latin-1")) for k, v in request.headers if k in passed_on]
    try:
        reply = await ask(method, _WHOLE.get(target, target), bytes(body), headers)
        status, content_type, content = reply.status, reply.content_type, reply.body
        if status >= 500:
            failures.append(f"{method} {target}: the guest server answered {status}: {content[:200]!r}")
    except (GuestError, CheckerError) as e:
        failures.append(f"{method} {target}: {e}")
        if e.facts.get("too_large"):
            hostile.append(failures[-1])
        status, content_type, content = 502, "text/plain", b"the desktop could not be asked"
    fields = [("Content-Type", content_type), ("Content-Length", str(len(content))), ("Connection", "close")]
    answer = h11.Response(status_code=status, headers=fields)
    for out in (answer, h11.Data(data=content), h11.EndOfMessage()):
        await stream.send_all(connection.send(out) or b"")
