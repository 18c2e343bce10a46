"""Gate `lock_pre_resume`: the file locks still equal those of the checkpoint just before the first instruction.

CRIU goes on restoring after `lock_applied` has looked (credentials, timers, closing its own descriptors), and later
than this a process may rightly change its locks.
"""

from __future__ import annotations

from typing import final

from drums_core.abc import DesktopView
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase
from drums_gates._locks import check_locks, record_locks


@final
class LockPreResumeGate:
    """The locks at the last moment."""

    phase = Phase.PRE_RESUME
    records = True

    async def record(self, view: DesktopView) -> Json:
        """The locks of the frozen desktop."""
        return await record_locks(view)

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether they are still the checkpoint's."""
        return await check_locks(view, evidence)


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("lock_pre_resume", LockPreResumeGate)
