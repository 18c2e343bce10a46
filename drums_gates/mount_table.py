"""Gate `mount_table`: the mount table equals that of the checkpoint, its order included."""

from __future__ import annotations

from typing import final

import trio

from drums_core.abc import DesktopView
from drums_core.evidence import mounts
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase, passed
from drums_gates._report import differs, no_evidence


@final
class MountTableGate:
    """What init's mount namespace shows."""

    phase = Phase.PRE_RESUME
    records = True

    async def record(self, view: DesktopView) -> Json:
        """The normalised mount table."""
        return {"mounts": await trio.to_thread.run_sync(mounts.read_mounts, view.pid1)}

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether it is equal."""
        if not isinstance(evidence, dict) or not isinstance(evidence.get("mounts"), list) or not evidence["mounts"]:
            return no_evidence("the mount table", evidence)
        observed = await trio.to_thread.run_sync(mounts.read_mounts, view.pid1)
        differences = mounts.difference(evidence["mounts"], observed)
        return differs("the mount table", differences) if differences else passed()


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("mount_table", MountTableGate)
