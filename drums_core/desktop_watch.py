"""The watch over a slot's desktop while it lives: its settled phase, its OOM counter, and the end of its init."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import trio

from drums_core.checkpoint import Checkpoint
from drums_core.desktop import Desktop
from drums_core.episode import Episode
from drums_core.sys.oom import open_notifier
from drums_core.sys.waiting import wait_readable

if TYPE_CHECKING:
    from drums_core.slot import Slot

_AFTER_OOM_S = (0.0, 0.05, 0.2, 0.5, 1.0)


@attrs.define(eq=False)
class DesktopWatch:
    """The watch over one desktop, until it is stopped.

    Args:
        slot: whose desktop it is.
        episode: what the gates' results are added to.
        checkpoint: that the desktop was started from.
        on_end: called when its init has ended.
    """

    slot: Slot
    desktop: Desktop
    episode: Episode
    checkpoint: Checkpoint
    on_end: Callable[[], None]
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def stop(self) -> None:
        """End the watch; the desktop is about to be stopped."""
        self._scope.cancel()

    async def run(self) -> None:
        """Judge the settled phase, and notice the end of init, until the desktop is stopped."""
        if self._scope.cancel_called:
            return  # it was stopped before this task had its first turn
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._settle)
                nursery.start_soon(self._watch_memory)
                pidfd = os.pidfd_open(self.desktop.pid1)
                try:
                    await wait_readable(pidfd)
                finally:
                    os.close(pidfd)
                nursery.cancel_scope.cancel()
                self.on_end()

    async def _settle(self) -> None:
        evidence = await trio.to_thread.run_sync(self.checkpoint.evidence)
        settled = await self.desktop.settle(evidence)
        inherited = await self.episode.inherited(self.slot.host.config.gate_timeout_s)
        self.episode.add([*inherited, *settled])
        self.slot.check_oom()

    async def _watch_memory(self) -> None:
        """Read the OOM counter when the kernel says that it may have changed."""
        notifier = open_notifier(self.desktop.cgroup)
        try:
            while True:
                await wait_readable(notifier)
                os.read(notifier, 4096)
                for pause_s in _AFTER_OOM_S:  # version 1 tells of it before it has killed
                    await trio.sleep(pause_s)
                    self.slot.check_oom()
        finally:
            os.close(notifier)
