"""The guest server: no answer, a wrong one, one from something else on its port, one that comes too late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drums_core.testing.faults.model import PLANT, Fault, Need, Point

TIGHT_READY_LIMIT_S = 4.0
"""How long the guest server of a tight host has."""


def _fault(
    name: str, about: str, action: str, arguments: Mapping[str, Any], *says: str, point: Point = Point.RESUMED
) -> Fault:
    full = f"guest_ready:{name}" if name else "guest_ready"
    needs = frozenset({Need.TIGHT})
    words = (f"did not answer within {TIGHT_READY_LIMIT_S:g} s", *says)
    return Fault(full, ("guest_ready",), point, about, action, PLANT / "guest.py", arguments, needs=needs, says=words)


def _instead(how: str, about: str, *says: str) -> Fault:
    return _fault(
        how, f"something else has the guest server's port, and {about}", "answer_instead", {"how": how}, *says
    )


GUEST_FAULTS = [
    _fault("", "the guest server is stopped", "stop_server", {}),
    _fault(
        "late",
        "the guest server is stopped, and goes on after the limit",
        "stop_server",
        {"resume_after_s": TIGHT_READY_LIMIT_S + 1.0},
    ),
    _fault(
        "secret",
        "the guest server knows another desktop's secret",
        "change_secret",
        {},
        "does not know this desktop's secret",
        point=Point.PRE_RESUME,
    ),
    _instead("silent", "says nothing"),
    _instead("closes", "closes every connection"),
    _instead("babbles", "speaks no HTTP"),
    _instead("unproven", "answers 200 without proof", "no valid proof"),
    _instead("fails", "answers 500 with the server's own proof", "answered /health with 500"),
]
"""Faults of `guest_ready`."""
