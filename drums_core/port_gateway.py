"""Serving ports of a desktop to a checker's worker: a browser's debugging port, and VLC's page.

Bytes are passed on as they are, both ways. Of what the desktop says, the host looks only at the first twelve bytes:
whether it is a reply in HTTP, and whether that opens a websocket. What could not be asked is noted here, outside the
worker, as the guest's gateway does: OSWorld's getters swallow it into empty lists, and a score must be withheld then.

A getter may find no browser, start one, and connect again. So a connection without an answer counts only when none
that came later had one. A websocket that the desktop breaks off counts always: what was read by then is a part.

Sources: RFC 9112 (the status line), RFC 6455 section 5.2 (frames).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import attrs
import trio

from drums.errors import DrumsError, PortError

GRADED_PORTS = (9222, 8080)
"""Where OSWorld's getters reach the browser (a task's own `socat` leads from there) and VLC."""
CONNECTIONS_AT_ONCE = 32
CONNECTIONS = 1000
SENT_LIMIT_BYTES = 64 << 20
RECEIVED_LIMIT_BYTES = 512 << 20

_CHUNK = 1 << 16
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)")
_STATUS_BYTES = 12
_CLOSE = 8
_BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)

ConnectPort = Callable[[int], AbstractAsyncContextManager[trio.SocketStream]]
"""A stream to a port of the desktop; entering it raises `PortError` where nothing takes the connection."""


@attrs.define(eq=False)
class PortGateway:
    """The ports of the desktop that one check looks at.

    Args:
        connect: connects to one.
        failures: gets a line for each time that the desktop could not be asked.
        hostile: gets those of these lines that tell of what only a program in the desktop can have made so.
        failed: the ports that the lines are about.
    """

    connect: ConnectPort
    failures: list[str]
    hostile: list[str]
    failed: set[int] = attrs.field(factory=set)
    _connections: int = 0
    _sent: int = 0
    _received: int = 0

    async def serve(self, port: int, listening_fd: int) -> None:
        """Pass connections on to a port until cancelled; then what is still without an answer is noted.

        Args:
            port: of the desktop.
            listening_fd: a TCP socket, taken over and closed here.
        """
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=listening_fd)))
        limit = trio.CapacityLimiter(CONNECTIONS_AT_ONCE)
        served = _Port(port)

        async def handle(stream: trio.SocketStream) -> None:
            async with limit, stream:
                await self._pass_on(served.talk(), stream)

        try:
            async with listener:
                await trio.serve_listeners(handle, [listener])
        finally:
            if served.unanswered:
                self._note(served.unanswered)

    def _note(self, talk: _Talk) -> None:
        self.failures.append(talk.fault)
        self.failed.add(talk.port.number)
        if talk.hostile:
            self.hostile.append(talk.fault)

    async def _pass_on(self, talk: _Talk, worker: trio.SocketStream) -> None:
        self._connections += 1
        try:
            if self._connections > CONNECTIONS:
                raise PortError(f"the checker made more than {CONNECTIONS} connections to ports of the desktop")
            async with self.connect(talk.port.number) as desktop, trio.open_nursery() as nursery:
                both = nursery.cancel_scope
                nursery.start_soon(self._inwards, talk, worker, desktop, both)
                nursery.start_soon(self._outwards, talk, worker, desktop, both)
        except DrumsError as e:
            talk.fault = e.message
        except _BROKEN as e:
            talk.fault = f"port {talk.port.number} of the desktop: {e}"
        finally:
            if talk.final:
                self._note(talk)
            elif talk.fault:
                talk.port.gave_no_answer(talk)

    async def _inwards(
        self, talk: _Talk, worker: trio.SocketStream, desktop: trio.SocketStream, both: trio.CancelScope
    ) -> None:
        while data := await _receive(worker):
            self._sent += len(data)
            if self._sent > SENT_LIMIT_BYTES:
                talk.too_much(f"the checker sent more than {SENT_LIMIT_BYTES >> 20} MiB to ports of the desktop")
                break
            talk.asks(data)
            if talk.fault:
                talk.port.gave_no_answer(talk)
            try:
                await desktop.send_all(data)
            except _BROKEN:
                return  # what it said before it broke off is still to be read
        both.cancel()

    async def _outwards(
        self, talk: _Talk, worker: trio.SocketStream, desktop: trio.SocketStream, both: trio.CancelScope
    ) -> None:
        while data := await _receive(desktop):
            self._received += len(data)
            if self._received > RECEIVED_LIMIT_BYTES:
                talk.too_much(f"ports of the desktop sent more than {RECEIVED_LIMIT_BYTES >> 20} MiB", hostile=True)
                break
            if talk.says(data):
                talk.port.answered(talk)
            try:
                await worker.send_all(data)
            except _BROKEN:
                break
        else:
            talk.desktop_ended()
        both.cancel()


async def _receive(stream: trio.SocketStream) -> bytes:
    """What comes next; nothing at the end, however it came about."""
    try:
        return bytes(await stream.receive_some(_CHUNK))
    except _BROKEN:
        return b""


@attrs.define(eq=False)
class _Port:
    """A port of the desktop, and the last connection to it without an answer, if none that came later had one."""

    number: int
    unanswered: _Talk | None = None
    _talks: int = 0
    _answered: int = 0  # the number of the last connection that had an answer

    def talk(self) -> _Talk:
        """A new connection."""
        self._talks += 1
        return _Talk(self, self._talks)

    def gave_no_answer(self, talk: _Talk) -> None:
        """To what was asked over a connection."""
        if talk.number > max(self._answered, self.unanswered.number if self.unanswered else 0):
            self.unanswered = talk

    def answered(self, talk: _Talk) -> None:
        """What was asked over a connection."""
        self._answered = max(self._answered, talk.number)
        if self.unanswered and self.unanswered.number <= self._answered:
            self.unanswered = None


@attrs.define(eq=False)
class _Talk:
    """What the host understands of one connection; `fault` says what is wrong with it, "" when nothing is."""

    port: _Port
    number: int
    fault: str = ""
    hostile: bool = False
    final: bool = False  # it counts, whatever comes later
    _status: int = 0  # of the first reply
    _said: bytes = b""
    _frames: _Frames = attrs.field(factory=lambda: _Frames())

    def asks(self, data: bytes) -> None:
        """The worker sent something."""
        if self._status == 101:
            self._frames.feed(data)
        elif not self._status and not self.fault:
            self.fault = f"port {self.port.number} of the desktop gave no reply"

    def says(self, data: bytes) -> bool:
        """The desktop sent something; true when that makes it an answer."""
        if len(self._said) == _STATUS_BYTES:
            return False
        self._said += data[: _STATUS_BYTES - len(self._said)]
        if match := _STATUS.fullmatch(self._said):
            self._status, self.fault = int(match[1]), ""
            return True
        self.fault = f"port {self.port.number} of the desktop answers {self._said!r}, which is no HTTP"
        self.hostile = len(self._said) == _STATUS_BYTES
        return False

    def desktop_ended(self) -> None:
        """The desktop ended the connection, and the worker had not."""
        if self._status == 101 and not self._frames.closing:
            self.fault, self.final = f"port {self.port.number} of the desktop broke the websocket off", True
        elif not self._status and not self._said:
            self.fault = f"port {self.port.number} of the desktop closed the connection without a reply"

    def too_much(self, fault: str, *, hostile: bool = False) -> None:
        """A limit was passed."""
        self.fault, self.hostile, self.final = fault, hostile, True


@attrs.define(eq=False)
class _Frames:
    """Follows a websocket's frames, to see whether the one who sends them has closed it."""

    closing: bool = False
    _head: bytes = b""
    _body: int = 0  # bytes of the current frame that are still to come

    def feed(self, data: bytes) -> None:
        """What was sent."""
        at = 0
        while at < len(data) and not self.closing:
            if self._body:
                passed = min(self._body, len(data) - at)
                self._body -= passed
                at += passed
                continue
            had = len(self._head)
            head = self._head + data[at : at + 14]  # a head is not longer
            length = _head_length(head)
            if length is None or length > len(head):
                self._head = head
                return
            at += length - had
            self._head = b""
            self._body = _body_length(head)
            self.closing = head[0] & 15 == _CLOSE


def _head_length(head: bytes) -> int | None:
    if len(head) < 2:
        return None
    return 2 + {126: 2, 127: 8}.get(head[1] & 127, 0) + (4 if head[1] & 128 else 0)


def _body_length(head: bytes) -> int:
    short = head[1] & 127
    extra = {126: 2, 127: 8}.get(short, 0)
    return int.from_bytes(head[2 : 2 + extra], "big") if extra else short
