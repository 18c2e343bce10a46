"""Gate `no_oom_kill`: added as failed when the out-of-memory killer took a process of the desktop.

Cause: the agent's once it has acted in the episode (its actions filled the memory), else the infrastructure's.
"""

from __future__ import annotations

from typing import final

from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Cause, DesktopEvent, Finding, OutOfMemory, Phase, WatchLost, failed


@final
class NoOomKillGate:
    """Judges memory events, and gaps in watching them."""

    phase = Phase.EVENT

    def judge(self, event: DesktopEvent) -> Finding | None:
        """A failed finding for a kill, and for a gap in which one may have gone unseen."""
        if isinstance(event, OutOfMemory):
            return failed(
                f"the out-of-memory killer took processes of the desktop: {event.kills} kills so far, expected 0",
                observed=event.kills,
                expected=0,
                cause=Cause.AGENT if event.after_action else Cause.INFRASTRUCTURE,
            )
        if isinstance(event, WatchLost):
            return failed(
                f"an out-of-memory kill may have gone unseen: {event.reason}",
                observed=event.reason,
                cause=Cause.AGENT if event.by_agent else Cause.INFRASTRUCTURE,
            )
        return None


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("no_oom_kill", NoOomKillGate)
