"""Answers: plain ones, the event stream of a long call, and the feed of a host's events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import attrs
import structlog
import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from drums.errors import DrumsError
from drums_core.daemon.problems import MEDIA_TYPE, problem, translated
from drums_core.events import HostEvent
from drums_core.host import Host

_log = structlog.get_logger("drums.http")
KEEP_ALIVE_S = 15.0
_UNDONE = frozenset(
    {
        "unauthorized",
        "request_timeout",
        "payload_too_large",
        "malformed_json",
        "config_error",
        "capacity_exhausted",
        "slot_busy",
        "shutting_down",
    }
)
"""Codes that say that nothing was done: a retry under the same key tries anew."""


@attrs.define
class Answer:
    """What a call came to.

    Args:
        status: of HTTP.
        body: JSON, bytes, or None for no content.
        media_type: of the body.
        undo: takes back what was done, for an answer that does not arrive.
        repeatable: nothing was done, so that a retry may do it.
    """

    status: int
    body: Any = None
    media_type: str = "application/json"
    headers: Mapping[str, str] = attrs.field(factory=dict)
    undo: Callable[[], Awaitable[None]] | None = None
    repeatable: bool = False

    def content(self) -> bytes:
        """The body's bytes."""
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else encode(self.body)

    async def take_back(self) -> None:
        """Undo, whatever is cancelled meanwhile."""
        if self.undo is not None:
            undo, self.undo = self.undo, None
            with trio.CancelScope(shield=True):
                try:
                    await undo()
                except DrumsError:
                    _log.exception("what nobody was told of could not be taken back")


def encode(document: Any) -> bytes:
    """JSON in UTF-8; text of a desktop that is no text keeps its escapes."""
    return json.dumps(document, default=str, separators=(",", ":")).encode()


def refusal(error: BaseException) -> Answer:
    """The answer of a call that failed."""
    told = translated(error)
    headers = {"WWW-Authenticate": 'Bearer realm="drums"'} if told.status == 401 else {}
    if told.status == 503:
        headers["Retry-After"] = "1"
    return Answer(told.status, problem(told), MEDIA_TYPE, headers, repeatable=told.code in _UNDONE)


class Plain(Response):
    """An answer as one response. One that is not sent to its end is taken back."""

    def __init__(self, answer: Answer, *, on_loss: Callable[[], None] = lambda: None) -> None:
        headers = {"Cache-Control": "no-store", **answer.headers}
        media_type = None if answer.body is None else answer.media_type
        super().__init__(answer.content(), answer.status, headers, media_type)
        self.answer = answer
        self._on_loss = on_loss

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        except BaseException:
            self._on_loss()
            await self.answer.take_back()
            raise


def event_text(kind: str, document: Any) -> bytes:
    """One server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode(document))


def _of_host(event: HostEvent) -> dict[str, Any]:
    return attrs.asdict(event)


class _Stream(Response):
    """Server-sent events."""

    async def begin(self, send: Send) -> None:
        """Send the response's head."""
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")],
            }
        )

    async def put(self, send: Send, data: bytes, *, last: bool = False) -> None:
        """Send some."""
        await send({"type": "http.response.body", "body": data, "more_body": not last})


@attrs.define
class Following:
    """Whose events are the progress of a call."""

    slots: set[str] = attrs.field(factory=set)


class LongCall(_Stream):
    """A call whose progress is streamed, with its answer as the last event. One that does not arrive is taken back."""

    def __init__(
        self,
        host: Host,
        following: Following,
        run: Callable[[], Awaitable[Answer]],
        *,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._host, self._following, self._run, self._on_loss = host, following, run, on_loss
        self._answer: Answer | None = None
        self._waiting = trio.CancelScope()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the call and stream."""
        try:
            async with self._host.events() as events, trio.open_nursery() as nursery:
                nursery.start_soon(self._work)
                await self.begin(send)
                while self._answer is None:
                    await self._forward(events, send)
                while await self._forward(events, send, quiet=True):
                    pass
            await self._finish(send)
        except BaseException:
            if self._answer is not None:
                self._on_loss()
                await self._answer.take_back()
            raise

    async def _work(self) -> None:
        self._answer = await self._run()
        self._waiting.cancel()

    async def _forward(self, events: AsyncIterator[HostEvent], send: Send, *, quiet: bool = False) -> bool:
        event: HostEvent | None = None
        if not quiet:
            self._waiting = trio.CancelScope(deadline=trio.current_time() + KEEP_ALIVE_S)
            if self._answer is not None:
                return False
            with self._waiting:
                event = await anext(events)
        else:
            assert isinstance(events, trio.MemoryReceiveChannel)
            try:
                event = events.receive_nowait()
            except trio.WouldBlock:
                return False
        if event is None:
            if self._answer is None and not quiet:
                await self.put(send, b": keep-alive\n\n")
        elif event.kind == "dropped" or event.slot in self._following.slots:
            await self.put(send, event_text("progress", _of_host(event)))
        return True

    async def _finish(self, send: Send) -> None:
        answer = self._answer
        assert answer is not None
        if answer.media_type == MEDIA_TYPE:
            last = event_text("problem", answer.body)
        else:
            last = event_text("result", {"status": answer.status, "body": answer.body})
        await self.put(send, last, last=True)


class EventFeed(_Stream):
    """The events of a host, or of one slot until it is closed."""

    def __init__(self, host: Host, slot: str | None) -> None:
        super().__init__()
        self._host, self._slot = host, slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the client leaves."""
        async with self._host.events() as events:
            await self.begin(send)
            # A client learns that it is subscribed.
            await self.put(send, b": listening\n\n")
            while True:
                event: HostEvent | None = None
                with trio.move_on_after(KEEP_ALIVE_S):
                    event = await anext(events)
                if event is None:
                    await self.put(send, b": keep-alive\n\n")
                elif self._slot in (None, event.slot) or event.kind == "dropped":
                    await self.put(send, event_text(event.kind, _of_host(event)))
                    if self._slot is not None and _is_end(event):
                        await self.put(send, b"", last=True)
                        return


def _is_end(event: HostEvent) -> bool:
    return event.kind == "slot_state" and isinstance(event.data, dict) and event.data.get("state") == "closed"
