"""Idempotency keys: the same key with the same request gets the same answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import attrs
import trio

from drums_core.daemon.answers import Answer, refusal
from drums_core.daemon.problems import IdempotencyConflict

KEPT_S = 24 * 3600.0
KEPT_KEYS = 10_000
KEPT_BYTES = 64 << 20


@attrs.define(eq=False)
class _Entry:
    request: bytes
    since: float = attrs.field(factory=time.monotonic)
    done: trio.Event = attrs.field(factory=trio.Event)
    answer: Answer | None = None
    size_bytes: int = 0
    told: int = 0


@attrs.define(eq=False)
class Ledger:
    """The keys of a daemon's life, oldest first; the oldest go when there are too many, or too much is kept."""

    _entries: dict[str, _Entry] = attrs.field(factory=dict)
    _bytes: int = 0

    async def answer(self, key: str, request: bytes, run: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer kept under this key, or that of `run`, which runs once at a time.

        Args:
            request: a hash of the request.

        Cancellation: another one with the same key that waits runs it then.
        """
        while True:
            self._expire()
            entry = self._entries.get(key)
            if entry is None:
                return await self._lead(key, request, run)
            if entry.request != request:
                return refusal(
                    IdempotencyConflict(
                        f"the idempotency key {key!r} was used for another request", hint="take a new key", key=key
                    )
                )
            await entry.done.wait()
            if entry.answer is not None:
                entry.told += 1
                # What others have been told of is not taken back when this one's answer is lost.
                return attrs.evolve(entry.answer, undo=None)

    async def _lead(self, key: str, request: bytes, run: Callable[[], Awaitable[Answer]]) -> Answer:
        entry = self._entries[key] = _Entry(request)
        try:
            answer = await run()
            if not answer.repeatable:
                entry.answer = attrs.evolve(answer, undo=None)
                entry.size_bytes = len(answer.content())
                self._bytes += entry.size_bytes
        finally:
            if entry.answer is None and self._entries.get(key) is entry:
                del self._entries[key]
            entry.done.set()
        if answer.undo is not None:
            undo = answer.undo

            async def undo_unless_told() -> None:
                if not entry.told:
                    await undo()

            answer.undo = undo_unless_told
        return answer

    def forget(self, key: str) -> None:
        """Drop a key whose answer was lost before anybody had it."""
        entry = self._entries.get(key)
        if entry is not None and entry.done.is_set() and not entry.told:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._bytes -= self._entries.pop(key).size_bytes

    def _expire(self) -> None:
        now = time.monotonic()
        for key, entry in list(self._entries.items()):
            if not entry.done.is_set():
                continue
            if now - entry.since <= KEPT_S and len(self._entries) < KEPT_KEYS and self._bytes <= KEPT_BYTES:
                break
            self._drop(key)
