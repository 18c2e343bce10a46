"""Gate `state_hash`: the home directory's listing and file hashes equal the checkpoint's."""

from __future__ import annotations

from typing import final

import trio

from drums_core.abc import DesktopView
from drums_core.evidence import files
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase, passed
from drums_gates._report import differs, no_evidence


def _read(view: DesktopView) -> Json:
    return files.hash_tree(view.root, view.home)


@final
class StateHashGate:
    """Every entry of the home directory, and every byte of its files."""

    phase = Phase.PRE_RESUME
    records = True

    async def record(self, view: DesktopView) -> Json:
        """Listing and hashes."""
        return await trio.to_thread.run_sync(_read, view)

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether they are equal."""
        entries = evidence.get("entries") if isinstance(evidence, dict) else None
        if not isinstance(entries, dict) or files.ROOT not in entries or len(entries) != evidence.get("count"):
            return no_evidence("the home directory", sorted(evidence) if isinstance(evidence, dict) else evidence)
        observed = await trio.to_thread.run_sync(_read, view)
        differences = files.diff_trees(evidence, observed)
        return differs("the home directory", differences) if differences else passed()


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("state_hash", StateHashGate)
