"""Requests, replies, and *flows*: generators that yield requests and pauses and return what the caller wants.

All that decides is in flows, once; `SyncTransport` and `AsyncTransport` only carry out what a flow yields.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import attrs

from drums._answers import error_of
from drums.errors import DaemonUnreachable, DrumsError

T = TypeVar("T")

QUICK_S = 60.0  # a daemon that is alive answers in milliseconds, and says every 15 s that a long call goes on
PAUSES_S = (0.1, 0.4)  # before the second and the third try


@attrs.frozen
class Request:
    """What is asked.

    Args:
        method: GET, POST, PUT or DELETE.
        path: below the base URL, quoted.
        body: what to send as JSON, or bytes as they are; None is no body.
        params: the query.
        read_timeout_s: seconds of silence after which the daemon is given up.
        is_long: ask for the answer as an event stream, which is never silent for long.
        key: an idempotency key, "" for none: with it the daemon answers a repetition as it did the first time.
            Every request can be repeated: what changes something has a key, or is the same done twice.
    """

    method: str
    path: str
    body: Any = None
    params: Mapping[str, str] = attrs.field(factory=dict)
    read_timeout_s: float = QUICK_S
    is_long: bool = False
    key: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def post(path: str, body: Any = None, *, read_timeout_s: float = QUICK_S, is_long: bool = False) -> Request:
    """A request that changes something, with a key of its own."""
    key = f"drums-{uuid.uuid4().hex}"
    return Request("POST", path, body, read_timeout_s=read_timeout_s, is_long=is_long, key=key)


@attrs.frozen
class Reply:
    """What was answered."""

    request: Request
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            DrumsError: it is none, so whatever answered is no drums daemon.
        """
        try:
            return json.loads(self.body)
        except ValueError as e:
            raise DrumsError(
                f"{self.request} was answered with something else than JSON: {self.excerpt()}",
                hint="is the URL that of a drums daemon?",
            ) from e

    def field(self, name: str, kind: type[T]) -> T:
        """One field of the JSON object.

        Raises:
            DrumsError: it is not there, or something else.
        """
        document = self.json()
        value = document.get(name) if isinstance(document, dict) else None
        if not isinstance(value, kind):
            raise DrumsError(f"{self.request} was answered without {name!r} as {kind.__name__}: {self.excerpt()}")
        return value

    def object(self) -> dict[str, Any]:
        """The JSON object.

        Raises:
            DrumsError: it is something else.
        """
        document = self.json()
        if not isinstance(document, dict):
            raise DrumsError(f"{self.request} was answered with {type(document).__name__}, expected an object")
        return document

    def excerpt(self) -> str:
        """Its beginning, for a message."""
        kind = self.headers.get("content-type", "no content type")
        return f"status {self.status}, {kind}, {self.body[:200].decode('utf-8', 'replace')!r}"


@attrs.frozen
class Pause:
    """Wait so many seconds."""

    seconds: float


Flow = Generator[Request | Pause, Any, T]


def ask(request: Request) -> Flow[Reply]:
    """Send, again if that is safe, until there is an answer.

    Raises:
        DrumsError: what the daemon's problem document says, or `DaemonUnreachable`.
    """
    pauses = list(PAUSES_S)
    while True:
        try:
            reply: Reply = yield request
        except DaemonUnreachable as e:
            if not pauses or not e.again:
                raise
            yield Pause(pauses.pop(0))
            continue
        if reply.status >= 300:
            raise error_of(reply)
        return reply
