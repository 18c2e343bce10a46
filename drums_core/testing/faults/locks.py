"""File locks: of each kind, dropped, weakened, strengthened, on another range, held by another, one too many.

Each at two moments: once the restore has applied them (both lock gates see it), and at the last moment. Under a frozen
cgroup no call can be made in a process's place, and a POSIX lock is its process's own to change: only at the first.
"""

from __future__ import annotations

from drums_core.testing.faults.model import PLANT, Fault, Need, Point

_BOTH = ("lock_applied", "lock_pre_resume")
_FILE = PLANT / "locks.py"
_CHANGES = (
    # kind, how, file, in words, words of the reason
    ("FLOCK", "drop", "flock", "is dropped", "1 missing: FLOCK WRITE 0..EOF"),
    ("FLOCK", "weaken", "flock", "is made a shared one", "FLOCK READ 0..EOF"),
    ("FLOCK", "strengthen", "flock-shared", "was shared and is made exclusive", "FLOCK WRITE 0..EOF"),
    ("FLOCK", "move", "flock", "is held by another process", "1 that the checkpoint did not hold: FLOCK WRITE 0..EOF"),
    ("FLOCK", "move", "waited", "is held by the process that waited for it", "FLOCK WRITE 0..EOF"),
    ("FLOCK", "unshare", "forked", "that two processes share is held by one of them", "1 missing: FLOCK WRITE 0..EOF"),
    ("FLOCK", "drop", "forked", "that two processes share is dropped", "2 missing: FLOCK WRITE 0..EOF"),
    ("FLOCK", "drop", "deleted", "on a deleted file is dropped", "deleted"),
    ("OFDLCK", "drop", "ofd", "is dropped", "1 missing: OFDLCK WRITE 10..29"),
    ("OFDLCK", "weaken", "ofd", "is made a shared one", "OFDLCK READ 10..29"),
    ("OFDLCK", "strengthen", "ofd-shared", "was shared and is made exclusive", "OFDLCK WRITE 10..29"),
    ("OFDLCK", "shift", "ofd", "ends a byte early", "OFDLCK WRITE 10..28"),
    ("OFDLCK", "extra", "ofd", "has another one beside it", "OFDLCK WRITE 1010..1014"),
    ("OFDLCK", "move", "ofd", "is held by another process", "1 that the checkpoint did not hold: OFDLCK WRITE 10..29"),
    ("POSIX", "drop", "posix", "is dropped", " missing: POSIX WRITE 100..199"),
    ("POSIX", "weaken", "posix", "is made a shared one", "POSIX READ 100..199"),
    ("POSIX", "strengthen", "posix-shared", "was shared and is made exclusive", "POSIX WRITE 100..199"),
    ("POSIX", "shift", "posix", "ends a byte early", "POSIX WRITE 100..198"),
    ("POSIX", "extra", "posix", "has another one beside it", "POSIX WRITE 1100..1104"),
    (
        "POSIX",
        "move",
        "posix",
        "is held by another process",
        "1 that the checkpoint did not hold: POSIX WRITE 100..199",
    ),
)
_SUFFIX = {"waited": "-by-its-waiter", "forked": "-shared", "deleted": "-deleted"}


def _faults() -> list[Fault]:
    found = []
    for gate, gates, point in (
        ("lock_applied", _BOTH, Point.RESTORED),
        ("lock_pre_resume", ("lock_pre_resume",), Point.PRE_RESUME),
    ):
        about = "an open file of the desktop has a lock that it had not before"
        says = ("1 file locks are held, 0 were", "FLOCK READ 0..EOF")
        found.append(Fault(gate, gates, point, about, "add_lock", _FILE, says=says))
        for kind, how, name, words, reason in _CHANGES:
            if point is Point.PRE_RESUME and (kind == "POSIX" or how == "unshare"):
                continue
            found.append(
                Fault(
                    f"{gate}:{kind.lower()}-{how}{_SUFFIX.get(name, '')}",
                    gates,
                    point,
                    f"a {kind} lock {words}",
                    "change_lock",
                    _FILE,
                    {"kind": kind, "how": how, "name": name},
                    needs=frozenset({Need.STAGE}),
                    says=(reason,),
                )
            )
    return found


LOCK_FAULTS = _faults()
"""Faults of `lock_applied` and `lock_pre_resume`."""
