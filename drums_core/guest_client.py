"""Talking to a desktop's guest server: HTTP over a socket that is opened inside the desktop's network namespace.

The desktop's addresses never meet the host's, and every request carries the desktop's secret, which no process of
the agent can read. One connection per request: a connection that is open while the desktop is frozen would be
dumped with it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import h11
import trio

from drums.errors import GuestError
from drums_core.sys.inside import tcp_socket_in

PORT = 5000
SECRET_HEADER = "X-Drums-Secret"
CHALLENGE_HEADER = "X-Drums-Challenge"
MAX_BODY_BYTES = 256 << 20


@attrs.frozen
class Response:
    """A reply of the guest server."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            GuestError: it is not JSON.
        """
        try:
            return json.loads(self.body)
        except ValueError as e:
            raise GuestError(f"the guest server answered {self.body[:80]!r}, which is not JSON") from e


@attrs.frozen
class GuestClient:
    """The guest server of one desktop.

    Args:
        netns_fd: the desktop's network namespace.
        secret: the secret that the desktop's guest server expects.
    """

    netns_fd: int
    secret: str = attrs.field(repr=False)

    async def connect(self) -> trio.SocketStream:
        """A stream to the guest server.

        Raises:
            OSError: nothing listens.
        """
        raw = await trio.to_thread.run_sync(tcp_socket_in, self.netns_fd)
        sock = trio.socket.from_stdlib_socket(raw)
        try:
            await sock.connect(("127.0.0.1", PORT))
        except BaseException:
            sock.close()
            raise
        return trio.SocketStream(sock)

    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Sequence[tuple[str, str]] = (),
        *,
        timeout_s: float = 130.0,
    ) -> Response:
        """One request and its whole reply.

        Raises:
            GuestError: no connection, no whole reply, or none in time.
        """
        try:
            with trio.fail_after(timeout_s):
                stream = await self.connect()
                async with stream:
                    return await exchange(stream, method, target, body, [*headers, (SECRET_HEADER, self.secret)])
        except trio.TooSlowError as e:
            raise GuestError(f"the guest server did not answer {method} {target} within {timeout_s:g} s") from e
        except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as e:
            raise GuestError(f"the guest server did not answer {method} {target}: {e}") from e

    async def call(self, method: str, target: str, document: Any = None, *, timeout_s: float = 130.0) -> Response:
        """A request with a JSON body whose reply must be a success.

        Raises:
            GuestError: as `request`, or the reply's status is not 200.
        """
        body = b"" if document is None else json.dumps(document).encode()
        response = await self.request(
            method, target, body, [("Content-Type", "application/json")] if body else [], timeout_s=timeout_s
        )
        if response.status != 200:
            raise GuestError(
                f"the guest server answered {method} {target} with {response.status}: {response.body[:300]!r}",
                guest_status=response.status,
            )
        return response

    async def health(self) -> None:
        """One challenge: the reply must prove knowledge of this desktop's secret.

        Raises:
            GuestError: no answer, or one from something that does not know the secret.
        """
        challenge = secrets.token_hex(16)
        response = await self.request("GET", "/health", headers=[(CHALLENGE_HEADER, challenge)], timeout_s=5.0)
        if response.status != 200:
            raise GuestError(f"the guest server answered /health with {response.status}, expected 200")
        proof = response.json()
        want = hmac.new(self.secret.encode(), challenge.encode(), hashlib.sha256).hexdigest()
        got = proof.get("proof") if isinstance(proof, Mapping) else None
        if not isinstance(got, str) or not hmac.compare_digest(got, want):
            raise GuestError("what answers on the guest server's port does not know this desktop's secret")


async def exchange(
    stream: trio.SocketStream, method: str, target: str, body: bytes, headers: Sequence[tuple[str, str]]
) -> Response:
    """Send one HTTP/1.1 request on a fresh stream and read the reply to its end (h11)."""
    connection = h11.Connection(h11.CLIENT)
    lines = [("Host", "desktop"), ("Connection", "close"), ("Content-Length", str(len(body))), *headers]
    for event in (h11.Request(method=method, target=target, headers=lines), h11.Data(data=body), h11.EndOfMessage()):
        data = connection.send(event)
        if data:
            await stream.send_all(data)
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
            if len(received) > MAX_BODY_BYTES:
                raise GuestError(f"the guest server sent more than the allowed {MAX_BODY_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage):
            break
        elif isinstance(event, h11.ConnectionClosed):
            raise GuestError("the guest server closed the connection without a reply")
    assert reply is not None  # h11 gives EndOfMessage only after a Response
    return Response(reply.status_code, list(reply.headers), bytes(received))
