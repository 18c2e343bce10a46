"""What happens on a host, as asynchronous iterators: progress, episodes, verdicts, deaths, states."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio

from drums_core.model import Json

BACKLOG = 1000


@attrs.frozen
class HostEvent:
    """One event.

    Args:
        kind: `slot_state`, `episode_started`, `verdict`, `desktop_event`, `note`, `progress`, `reward`, `dropped`.
        slot: the slot's id, "" for the host's own.
        episode: the episode's id, "" when there is none.
        data: what there is to say.
        at: seconds since the epoch.
    """

    kind: str
    slot: str = ""
    episode: str = ""
    data: Json = None
    at: float = attrs.field(factory=time.time)


@attrs.define
class EventBus:
    """Hands events to every subscriber. A subscriber that lags loses events, and is told so by a `dropped` event."""

    _channels: dict[trio.MemorySendChannel[HostEvent], bool] = attrs.field(factory=dict)

    def publish(self, event: HostEvent) -> None:
        """Send to all; never blocks."""
        for channel, lagging in list(self._channels.items()):
            try:
                if lagging:
                    channel.send_nowait(HostEvent("dropped"))
                    self._channels[channel] = False
                channel.send_nowait(event)
            except trio.WouldBlock:
                self._channels[channel] = True
            except trio.BrokenResourceError:
                del self._channels[channel]

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[HostEvent]]:
        """An iterator over everything published from now on."""
        send, receive = trio.open_memory_channel[HostEvent](BACKLOG)
        self._channels[send] = False
        try:
            async with receive:
                yield receive
        finally:
            self._channels.pop(send, None)
            send.close()
