"""A websocket to a desktop's port: messages are taken from one connection and sent on another.

The two handshakes have nothing in common but the path, the subprotocols and the fields that `ports` lets in. Whole
messages are passed on, so that a program in the desktop can make the client's end neither malformed nor endless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import attrs
import trio
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import ProtocolError

from drums.errors import DrumsError, PortError, SlotBusy
from drums_core.daemon.answers import Plain, refusal
from drums_core.daemon.ports import MARK, fields_for_desktop, port_of, target_of
from drums_core.host import Host
from drums_core.ports import PortClosed

MESSAGE_LIMIT_BYTES = 64 << 20
HANDSHAKE_LIMIT_S = 30.0
SEND_LIMIT_S = 30.0
_BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
_GOING_AWAY, _TOO_BIG, _INTERNAL, _RESTART = 1001, 1009, 1011, 1012  # RFC 6455, 7.4.1, and the registry of codes


async def serve_port(host: Host, websocket: WebSocket) -> None:
    """One websocket, to the end of either side, or until the slot ends its connections.

    What is refused is answered with a problem in place of the handshake. A connection that the slot ends, for a verify
    or a reset, is closed with 1012; one whose program sends too much with 1009, or broke off with 1011.
    """
    ended: tuple[int, str] = (_GOING_AWAY, "")
    problem: DrumsError | None = None
    try:
        slot, port = host.slot(websocket.path_params["slot"]), port_of(websocket.path_params["port"])
        target = target_of(websocket)
        async with slot.connect_port(port) as stream:
            relay = _Relay(websocket, stream, port)
            chosen = await relay.shake_hands(target)
            await websocket.accept(chosen, [(MARK.lower().encode(), str(port).encode())])
            ended = await relay.run()
    except PortClosed as e:
        ended = (_RESTART, str(e))
        problem = SlotBusy(f"the websocket was cut off: {e}", hint="try again when that is done")
    except DrumsError as e:
        problem = e
    if websocket.application_state is WebSocketState.CONNECTED:
        with suppress(WebSocketDisconnect, RuntimeError):  # it has left, or was closed in the meantime
            await websocket.close(ended[0], ended[1].encode()[:120].decode("utf-8", "ignore"))
    elif problem is not None:
        await websocket.send_denial_response(Plain(refusal(problem)))


@attrs.define(eq=False)
class _Relay:
    """A client's websocket, and a stream to the program in the desktop."""

    websocket: WebSocket
    stream: trio.SocketStream
    port: int
    _desktop: WSConnection = attrs.field(factory=lambda: WSConnection(ConnectionType.CLIENT))
    _events: deque[Event] = attrs.field(factory=deque)
    _sending: trio.Lock = attrs.field(factory=trio.Lock)
    _ended: tuple[int, str] | None = None

    async def shake_hands(self, target: str) -> str | None:
        """Open the desktop's side; returns the subprotocol that the program chose.

        Raises:
            PortError: it is not to be had.
        """
        request = Request(
            host=f"localhost:{self.port}",
            target=target,
            extra_headers=[(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._fields()],
            subprotocols=list(self.websocket.scope["subprotocols"]),
        )
        what = f"port {self.port} of the desktop"
        try:
            with trio.fail_after(HANDSHAKE_LIMIT_S):
                await self._send(request)
                answer = await self._next()
        except trio.TooSlowError:
            raise PortError(f"{what} opened no websocket in {HANDSHAKE_LIMIT_S:g} s", port=self.port) from None
        except ProtocolError as e:
            raise PortError(f"{what} speaks no websocket: {e}", port=self.port) from e
        if isinstance(answer, RejectConnection):
            message = f"{what} answered {target!r} with status {answer.status_code}, not with a websocket"
            raise PortError(message, port=self.port, port_status=answer.status_code)
        if not isinstance(answer, AcceptConnection):
            raise PortError(f"{what} closed the connection without an answer", port=self.port)
        return answer.subprotocol

    def _fields(self) -> Sequence[tuple[str, str]]:
        return fields_for_desktop(self.websocket.headers)

    async def run(self) -> tuple[int, str]:
        """Pass messages on until one side ends.

        Returns:
            The code and reason for the client.
        """
        async with trio.open_nursery() as nursery:
            for work in (self._from_client, self._from_desktop):
                nursery.start_soon(self._to_its_end, work, nursery.cancel_scope)
        assert self._ended is not None
        return self._ended

    async def _to_its_end(self, work: Callable[[], Awaitable[tuple[int, str]]], both: trio.CancelScope) -> None:
        try:
            ended = await work()
        except (*_BROKEN, trio.TooSlowError, ProtocolError, WebSocketDisconnect):
            ended = (_INTERNAL, f"port {self.port} of the desktop broke the connection off")
        self._ended = self._ended or ended
        both.cancel()

    async def _from_client(self) -> tuple[int, str]:
        while True:
            message = await self.websocket.receive()
            if message["type"] == "websocket.disconnect":
                await self._send(CloseConnection(code=1000))
                return _GOING_AWAY, ""
            text = message.get("text")
            await self._send(BytesMessage(message["bytes"]) if text is None else TextMessage(text))

    async def _from_desktop(self) -> tuple[int, str]:
        received = bytearray()
        while True:
            event = await self._next()
            if isinstance(event, Message):
                received += event.data.encode() if isinstance(event, TextMessage) else event.data
                if len(received) > MESSAGE_LIMIT_BYTES:
                    return _TOO_BIG, f"a message has more than {MESSAGE_LIMIT_BYTES} bytes"
                if event.message_finished:
                    await self._to_client(bytes(received), is_text=isinstance(event, TextMessage))
                    received.clear()
            elif isinstance(event, Ping):
                await self._send(event.response())
            elif isinstance(event, CloseConnection):
                known = event.code in (1000, 1001, 1002, 1003, *range(1007, 1015), *range(3000, 5000))
                return int(event.code) if known else _GOING_AWAY, event.reason or ""
            elif event is None:
                return _INTERNAL, f"port {self.port} of the desktop broke the connection off"

    async def _to_client(self, content: bytes, *, is_text: bool) -> None:
        if is_text:
            await self.websocket.send_text(content.decode())
        else:
            await self.websocket.send_bytes(content)

    async def _send(self, event: Event) -> None:
        async with self._sending:
            with trio.fail_after(SEND_LIMIT_S):
                await self.stream.send_all(self._desktop.send(event))

    async def _next(self) -> Event | None:
        """What the program said next; None at the connection's end."""
        while not self._events:
            try:
                data = await self.stream.receive_some(1 << 16)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                return None
            self._desktop.receive_data(bytes(data))
            self._events.extend(self._desktop.events())
        return self._events.popleft()
