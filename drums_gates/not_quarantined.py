"""Gate `not_quarantined`: added as failed when the desktop was quarantined.

Cause: always the infrastructure's. An agent has no way to quarantine its desktop; a harness or the runtime does it when
it holds the episode for broken, which says nothing about what the agent did.
"""

from __future__ import annotations

from typing import final

from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Cause, DesktopEvent, Finding, Phase, Quarantined, failed


@final
class NotQuarantinedGate:
    """Judges quarantines."""

    phase = Phase.EVENT

    def judge(self, event: DesktopEvent) -> Finding | None:
        """A failed finding for a quarantine, with its reason."""
        if not isinstance(event, Quarantined):
            return None
        by = "its user" if event.by_user else "the runtime"
        return failed(
            f"the desktop was quarantined by {by}: {event.reason}",
            observed=event.reason,
            cause=Cause.INFRASTRUCTURE,
        )


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("not_quarantined", NotQuarantinedGate)
