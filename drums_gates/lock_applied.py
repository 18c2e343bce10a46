"""Gate `lock_applied`: once CRIU and drums have put the file locks back, they equal those of the checkpoint."""

from __future__ import annotations

from typing import final

from drums_core.abc import DesktopView
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase
from drums_gates._locks import check_locks, record_locks


@final
class LockAppliedGate:
    """The locks right after the restore has applied them, before anything else can touch them."""

    phase = Phase.RESTORED
    records = True

    async def record(self, view: DesktopView) -> Json:
        """The locks of the frozen desktop."""
        return await record_locks(view)

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether each was applied, and no other."""
        return await check_locks(view, evidence)


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("lock_applied", LockAppliedGate)
