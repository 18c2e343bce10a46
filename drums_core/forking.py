"""Forking a slot: its desktop is dumped once, and its children are restored from that side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from drums_core.checkpoint import Checkpoint
from drums_core.episode import Episode
from drums_core.error_groups import first_error

if TYPE_CHECKING:
    from drums_core.slot import Slot


async def fork_slot(slot: Slot, count: int) -> list[Slot]:
    """`count` children of a slot, all or none; see `Slot.fork`."""
    host, store = slot.host, slot.host.services.store
    children = host.reserve(count, base=slot.base, task=slot.task, setup_at_reset=slot.setup_at_reset, ttl_s=slot.ttl_s)
    for child in children:
        child.labels = slot.labels
    try:
        checkpoint = await slot.snapshot()
        parent = (slot.episode, len(slot.episode.results))
        store.acquire(checkpoint)  # until every child holds it
        try:
            async with trio.open_nursery() as nursery:
                for child in children:
                    nursery.start_soon(_start_child, child, checkpoint, parent, slot.has_acted)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(store.release, checkpoint)
    except BaseException as e:
        with trio.CancelScope(shield=True):
            for child in children:
                await child.close(reason="the fork failed")
        if isinstance(e, BaseExceptionGroup):
            raise first_error(e) from e
        raise
    return children


async def _start_child(child: Slot, checkpoint: Checkpoint, parent: tuple[Episode, int], acted: bool) -> None:
    await child.begin(checkpoint, "fork", setup=False, acted=acted, parent=parent)
    child.episode.last_action, child.episode.listened = parent[0].last_action, parent[0].listened
