"""Talking to a desktop's guest server: HTTP over a socket that is opened inside the desktop's network namespace.

The desktop's addresses never meet the host's. One connection per request: a connection that is open while the desktop
is frozen would be dumped with it.

Each side proves to the other that it knows the desktop's secret, which no process of the agent can read and which never
travels: the agent may listen on the port while the guest server is dead, and must neither learn how to make a request
nor answer one. drums_core/guest/signing.py is the desktop's half; the two must agree to the byte.

A request has three header fields besides what it says:

    X-Drums-Nonce        32 lower-case hexadecimal digits, new for each request
    X-Drums-Body-SHA256  the body's SHA-256, in lower-case hexadecimal
    X-Drums-Signature    HMAC("drums-request", nonce, method, target, content type, body's SHA-256)

The reply to it ends with one trailer field:

    X-Drums-Proof        HMAC("drums-reply", nonce, status, content type, body's SHA-256)

HMAC is HMAC-SHA256 in lower-case hexadecimal. Its key is the secret's 64 bytes; its message is each field as a
netstring, one after the other: the length in bytes as decimal digits, a colon, the bytes, a comma. Text is latin-1, the
target is what the request line says, the status is three digits, and a content type that is not there is empty. So a
reply's message begins `11:drums-reply,32:`.
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
MAX_BODY_BYTES = 256 << 20


@attrs.frozen
class Response:
    """A reply of the guest server: the parts of it that are proven to be the server's."""

    status: int
    content_type: str
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
        secret: the secret that the desktop's guest server knows.
        address: of a Unix socket on the host that it listens on, None for its port in the desktop.
    """

    netns_fd: int
    secret: str = attrs.field(repr=False)
    address: bytes | None = None

    async def connect(self) -> trio.SocketStream:
        """A stream to the guest server.

        Raises:
            OSError: nothing listens.
        """
        if self.address is not None:
            sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        else:
            sock = trio.socket.from_stdlib_socket(await trio.to_thread.run_sync(tcp_socket_in, self.netns_fd))
        try:
            await sock.connect(("127.0.0.1", PORT) if self.address is None else self.address)
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
        """One signed request and its whole reply, proven to be the guest server's.

        Raises:
            GuestError: no connection, no whole reply, none in time, or one of something that does not know the secret.
        """
        nonce = secrets.token_hex(16)
        signed = [*headers, *_signed_fields(self.secret, nonce, method, target, headers, body)]
        try:
            with trio.fail_after(timeout_s):
                stream = await self.connect()
                async with stream:
                    status, fields, content = await _exchange(stream, method, target, body, signed)
        except trio.TooSlowError as e:
            raise GuestError(f"the guest server did not answer {method} {target} within {timeout_s:g} s") from e
        except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as e:
            raise GuestError(f"the guest server did not answer {method} {target}: {e}") from e
        content_type = fields.get("content-type", "")
        wanted = reply_proof(self.secret, nonce, status, content_type, hashlib.sha256(content).hexdigest())
        if not hmac.compare_digest(fields.get("x-drums-proof", "").encode("latin-1"), wanted.encode()):
            raise GuestError(
                "what answers on the guest server's port does not know this desktop's secret: "
                f"it answered {method} {target} with {status} and no valid proof"
            )
        return Response(status, content_type, content)

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
        """One short request.

        Raises:
            GuestError: no answer, or one from something that does not know the secret.
        """
        response = await self.request("GET", "/health", timeout_s=5.0)
        if response.status != 200:
            raise GuestError(f"the guest server answered /health with {response.status}, expected 200")


def request_signature(secret: str, nonce: str, method: str, target: str, content_type: str, body_sha256: str) -> str:
    """A request's `X-Drums-Signature`."""
    return _sign(secret, "drums-request", nonce, method, target, content_type, body_sha256)


def reply_proof(secret: str, nonce: str, status: int, content_type: str, body_sha256: str) -> str:
    """The `X-Drums-Proof` of the reply to a request with that nonce."""
    return _sign(secret, "drums-reply", nonce, str(status), content_type, body_sha256)


def _sign(secret: str, *fields: str) -> str:
    encoded = [field.encode("latin-1") for field in fields]
    message = b"".join(b"%d:%s," % (len(field), field) for field in encoded)
    return hmac.digest(secret.encode("latin-1"), message, "sha256").hex()


def _signed_fields(
    secret: str, nonce: str, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
) -> list[tuple[str, str]]:
    """The header fields that make a signed request of a request."""
    content_type = {name.lower(): value for name, value in headers}.get("content-type", "")
    body_sha256 = hashlib.sha256(body).hexdigest()
    return [
        ("X-Drums-Nonce", nonce),
        ("X-Drums-Body-SHA256", body_sha256),
        ("X-Drums-Signature", request_signature(secret, nonce, method, target, content_type, body_sha256)),
    ]


async def _exchange(
    stream: trio.SocketStream, method: str, target: str, body: bytes, headers: Sequence[tuple[str, str]]
) -> tuple[int, Mapping[str, str], bytes]:
    """Send one HTTP/1.1 request on a fresh stream and read the reply to its end (h11).

    Returns:
        The reply's status, its header and trailer fields by their names in lower case, and its body.
    """
    connection = h11.Connection(h11.CLIENT)
    lines = [("Host", "desktop"), ("Connection", "close"), ("Content-Length", str(len(body))), *headers]
    request = h11.Request(
        method=method, target=target, headers=[(k.encode("latin-1"), v.encode("latin-1")) for k, v in lines]
    )
    await stream.send_all(
        b"".join(connection.send(part) or b"" for part in (request, h11.Data(data=body), h11.EndOfMessage()))
    )
    status = 0
    fields: dict[str, str] = {}
    received = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(1 << 16))
        elif isinstance(event, h11.Response | h11.EndOfMessage):
            fields |= {k.decode("latin-1"): v.decode("latin-1") for k, v in event.headers}
            if isinstance(event, h11.EndOfMessage):
                return status, fields, bytes(received)
            status = event.status_code
        elif isinstance(event, h11.Data):
            received += event.data
            if len(received) > MAX_BODY_BYTES:
                message = f"the guest server sent more than the allowed {MAX_BODY_BYTES} bytes"
                raise GuestError(message, too_large=True)
        elif isinstance(event, h11.ConnectionClosed):
            raise GuestError("the guest server closed the connection without a reply")
