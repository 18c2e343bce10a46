"""Isolation: a process of the desktop in a namespace of the host's, of another desktop's, of nobody's; of each kind."""

from __future__ import annotations

from drums_core.testing.faults.model import PLANT, Fault, Need, Point

_WHOSE = {"host": "the host's", "other": "another desktop's", "new": "a new"}
_SUFFIX = {"host": "", "other": "-of-other", "new": "-of-nobody"}


def _fault(name: str, kinds: list[str], whose: str) -> Fault:
    # Out of the desktop's pid namespace a process is no process of the desktop, but a stranger in its cgroup.
    outside = "pid" in kinds
    return Fault(
        name,
        ("isolation", "cgroup") if outside else ("isolation",),
        Point.PRE_RESUME,
        f"a process of the desktop is in {_WHOSE[whose]} {' and '.join(kinds)} namespace",
        "add_process",
        PLANT / "isolation.py",
        {"kinds": kinds, "whose": whose},
        needs=frozenset({Need.OTHER}) if whose == "other" else frozenset(),
        says={
            "host": (f"shares the {kinds[0]} namespace of the host",),
            "other": (f"shares the {kinds[0]} namespace of desktop 'd-",),
            "new": (f"another {kinds[0]} namespace than the desktop's",),
        }[whose],
    )


ISOLATION_FAULTS = [
    _fault("isolation", ["mnt", "net", "ipc", "uts"], "host"),
    *(
        _fault(f"isolation:{kind}{_SUFFIX[whose]}", [kind], whose)
        for kind in ("pid", "mnt", "net", "ipc", "uts", "user")
        for whose in ("host", "other")
    ),
    *(_fault(f"isolation:{kind}-of-nobody", [kind], "new") for kind in ("mnt", "net", "ipc", "uts")),
]
"""Faults of `isolation`."""
