"""The outermost layer of the application: tokens, limits, and the end of a call whose caller has left.

Hypercorn lets a handler run on when its client is gone, and takes what is sent to a dead connection in silence; here
every call is cancelled then. Bodies are taken off the connection only as far as their route allows.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import h11
import structlog
import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drums.errors import AuthError
from drums_core.daemon.answers import Answer, Plain, refusal
from drums_core.daemon.problems import PayloadTooLarge, RequestTimeout, ShuttingDown
from drums_core.daemon.watch_page import PATHS

_log = structlog.get_logger("drums.http")
JSON_LIMIT_BYTES = 1 << 20
FILE_LIMIT_BYTES = 64 << 20
BODY_STALL_S = 30.0
BODY_LIMIT_S = 300.0
OPEN_PATHS = ("/openapi.json", "/v1/health", *PATHS)


def body_limit(method: str, path: str) -> int:
    """How many bytes a request's body may have."""
    return FILE_LIMIT_BYTES if method == "PUT" and path.endswith("/files") else JSON_LIMIT_BYTES


def unauthorized(admitted: bool | None) -> Answer:
    """The answer to a wrong token (False), or to none."""
    what = "the token is wrong" if admitted is False else "a token is needed"
    return refusal(AuthError(what, hint="set DRUMS_TOKEN, or read the daemon's token file"))


def is_of_connection(error: BaseException) -> bool:
    """Whether an error is that of a client that went away or spoke nonsense."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_of_connection(e) for e in error.exceptions)
    lost = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError, h11.ProtocolError)
    return isinstance(error, lost)


@attrs.define(eq=False)
class Guard:
    """Wraps an ASGI application.

    Args:
        token: what callers must present.
        stopping: once set, calls under way are cancelled and answered with `shutting_down`.
        observe: told of each answer's method and status.
    """

    app: ASGIApp
    token: str
    stopping: trio.Event
    observe: Callable[[str, int], None] = lambda _method, _status: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] not in ("http", "websocket"):
            return  # the server answers no lifespan's beginning
        try:
            if scope["type"] == "websocket":
                await self._websocket(scope, receive, send)
            else:
                await _Call(self, scope, receive, send).run()
        except Exception as e:  # noqa: BLE001 - one bad call must not end the daemon
            if is_of_connection(e):
                _log.debug("a connection broke", error=repr(e))
            else:
                _log.exception("a call failed", path=scope["path"])

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One websocket, until it or the daemon ends."""
        admitted = self.admits(scope)
        if admitted is not True:
            await Plain(unauthorized(admitted))(scope, receive, send)
            return
        async with trio.open_nursery() as nursery:

            async def watch_stop() -> None:
                await self.stopping.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch_stop)
            await self.app(scope, receive, send)
            nursery.cancel_scope.cancel()

    def admits(self, scope: Scope) -> bool | None:
        """Whether the right token is presented; None when none is."""
        presented = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if not presented:
            return None
        scheme, _, token = presented[0].partition(b" ")
        right = hmac.compare_digest(token.strip(), self.token.encode())
        return right and scheme.lower() == b"bearer" and len(presented) == 1


@attrs.define(eq=False)
class _Call:
    guard: Guard
    scope: Scope
    receive: Receive
    _send: Send
    _messages: deque[Message] = attrs.field(factory=deque)
    _arrived: trio.Event = attrs.field(factory=trio.Event)
    _received_bytes: int = 0
    _complete: bool = False
    _too_large: bool = False
    _gone: bool = False
    _answered: bool = False
    _status: int = 0
    _deadline: float = attrs.field(factory=lambda: trio.current_time() + BODY_LIMIT_S)

    async def run(self) -> None:
        path, method = self.scope["path"], self.scope["method"]
        admitted = self.guard.admits(self.scope)
        limit = body_limit(method, path)
        early: Answer | None = None
        if admitted is False or (admitted is None and path not in OPEN_PATHS):
            early = unauthorized(admitted)
        elif self._declared() > limit:
            early = refusal(self._too_much(self._declared(), limit))
        if early is not None:
            limit = 0
        self.scope["state"] = {**self.scope.get("state", {}), "authorized": admitted is True}
        problem: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, limit, nursery.cancel_scope)
            with trio.CancelScope() as working:
                nursery.start_soon(self._watch_stop, working)
                try:
                    if early is not None:
                        await self._answer(early)
                    else:
                        await self.guard.app(self.scope, self._next, self._put)
                except Exception as e:  # noqa: BLE001 - raised below, outside of the nursery that would wrap it
                    problem = e
            if working.cancelled_caught and not self._status:
                await self._answer(refusal(ShuttingDown("the daemon stops")))
            nursery.cancel_scope.cancel()
        self.guard.observe(method, self._status)
        if problem is not None and not self._gone:
            raise problem

    def _declared(self) -> int:
        for name, value in self.scope["headers"]:
            if name.lower() == b"content-length":
                return int(value)
        return 0

    def _too_much(self, size: int, limit: int) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body has {size} bytes or more, allowed are {limit}", limit_bytes=limit)

    async def _watch_stop(self, working: trio.CancelScope) -> None:
        await self.guard.stopping.wait()
        working.cancel()

    async def _pump(self, limit: int, everything: trio.CancelScope) -> None:
        """Take what the client sends; never wait for the application, which may have answered already."""
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                if self._answered:
                    return  # Hypercorn says so at the end of every exchange
                self._gone = True
                everything.cancel()
                return
            self._received_bytes += len(message.get("body", b""))
            if self._received_bytes > limit:
                self._too_large = True
                self._messages.clear()
            else:
                self._messages.append(message)
            self._complete = not message.get("more_body", False)
            self._arrived.set()

    async def _next(self) -> Message:
        """The application's `receive`."""
        while not self._messages:
            if self._too_large:
                raise self._too_much(self._received_bytes, body_limit(self.scope["method"], self.scope["path"]))
            if self._complete:
                await trio.sleep_forever()  # until the client leaves, which cancels
            self._arrived = trio.Event()
            with trio.move_on_at(min(self._deadline, trio.current_time() + BODY_STALL_S)) as scope:
                await self._arrived.wait()
            if scope.cancelled_caught:
                raise RequestTimeout(f"the body stopped after {self._received_bytes} bytes")
        return self._messages.popleft()

    async def _put(self, message: Any) -> None:
        """The application's `send`."""
        if self._gone:
            raise OSError("the client has left")
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif not message.get("more_body", False):
            self._answered = True
        await self._send(message)

    async def _answer(self, answer: Answer) -> None:
        content = answer.content()
        headers = {"Content-Type": answer.media_type, "Content-Length": str(len(content)), **answer.headers}
        if not self._complete:
            headers["Connection"] = "close"
        encoded = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
        await self._put({"type": "http.response.start", "status": answer.status, "headers": encoded})
        await self._put({"type": "http.response.body", "body": content})
