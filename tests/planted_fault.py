"""Actions of a custom gate's faults, for `test_gates_selftest.py`: run by path, with no package around them."""

from __future__ import annotations

from typing import Any


def make(target: Any) -> None:
    """A fault that needs nothing but the desktop."""
    if not target.pids():
        raise LookupError("the desktop has no process")


def cannot(target: Any) -> None:
    """A fault for which this host lacks something."""
    from drums_core.testing.plant.target import NotHere

    raise NotHere("there is no such thing here")
