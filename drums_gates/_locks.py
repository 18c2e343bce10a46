"""What the two lock gates share: the same evidence, compared at two moments."""

from __future__ import annotations

import trio

from drums_core.abc import DesktopView
from drums_core.evidence import locks, multisets
from drums_core.evidence.processes import processes_in_pidns
from drums_core.model import Finding, Json, failed, passed
from drums_gates._report import bounded, no_evidence, some


def _read(view: DesktopView) -> Json:
    return locks.read_locks(processes_in_pidns(view.namespaces["pid"]))


async def record_locks(view: DesktopView) -> Json:
    """All locks of the frozen desktop."""
    return {"locks": await trio.to_thread.run_sync(_read, view)}


async def check_locks(view: DesktopView, evidence: Json) -> Finding:
    """Whether the desktop holds the very locks of the evidence."""
    if not isinstance(evidence, dict) or not isinstance(evidence.get("locks"), list):
        return no_evidence("file locks", evidence)
    expected = evidence["locks"]
    observed = await trio.to_thread.run_sync(_read, view)
    missing, extra = multisets.difference(expected, observed, locks.describe)
    if not missing and not extra:
        return passed()
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing: {some(missing)}")
    if extra:
        parts.append(f"{len(extra)} that the checkpoint did not hold: {some(extra)}")
    return failed(
        f"{len(observed)} file locks are held, {len(expected)} were; {'; '.join(parts)}",
        observed={"count": len(observed), "extra": bounded(extra)},
        expected={"count": len(expected), "missing": bounded(missing)},
    )
