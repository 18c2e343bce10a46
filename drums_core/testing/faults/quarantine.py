"""Quarantines: before, during and after the 5 s, while the desktop is verified, and twice."""

from __future__ import annotations

from drums_core.testing.faults.model import By, Fault, Point

_GATE = "not_quarantined"


def _fault(name: str, about: str, point: Point, *, times: int = 1, after_s: float = 0.0) -> Fault:
    return Fault(
        f"{_GATE}:{name}" if name else _GATE,
        (_GATE,),
        point,
        about,
        "the page is broken",
        arguments={"times": times, "after_s": after_s},
        by=By.USER,
        says=("quarantined by its user: the page is broken",),
    )


QUARANTINE_FAULTS = [
    _fault("", "the desktop is quarantined after the verdict", Point.VALID),
    _fault("before", "it is quarantined at once", Point.UP),
    _fault("during", "it is quarantined halfway to its verdict", Point.UP, after_s=2.5),
    _fault("while-verified", "it is quarantined while the checker looks", Point.VERIFY),
    _fault("twice", "it is quarantined twice", Point.VALID, times=2),
]
"""Faults of `not_quarantined`."""
