"""Init: another command line, another program, a second one, one of another namespace."""

from __future__ import annotations

from drums_core.testing.faults.model import PLANT, Fault, Point

_FILE = PLANT / "init.py"
_CGROUPS = PLANT / "cgroups.py"

INIT_FAULTS = [
    Fault(
        "init_identity",
        ("init_identity",),
        Point.PRE_RESUME,
        "init has another last argument in its memory",
        "change_argument",
        _FILE,
        {"which": "last"},
        says=("1920x1081", "expected", "1920x1080"),
    ),
    Fault(
        "init_identity:first-argument",
        ("init_identity",),
        Point.PRE_RESUME,
        "init's command line begins with another letter",
        "change_argument",
        _FILE,
        {"which": "first"},
        says=("1usr/bin/tini", "expected"),
    ),
    Fault(
        "init_identity:program",
        ("init_identity",),
        Point.PRE_RESUME,
        "the program that init runs is another",
        "rename_program",
        _FILE,
        {"path": "usr/bin/tini", "to": "usr/bin/another"},
        says=("executable", "/usr/bin/another", "/usr/bin/tini"),
    ),
    Fault(
        "init_identity:second",
        ("init_identity", "cgroup"),
        Point.PRE_RESUME,
        "a second process of the desktop is pid 1, of a pid namespace below the desktop's",
        "second_init",
        _FILE,
        says=("2 processes are pid 1 inside",),
    ),
    Fault(
        "init_identity:of-another-namespace",
        ("init_identity", "cgroup"),
        Point.PRE_RESUME,
        "pid 1 of another pid namespace is among the desktop's processes",
        "move_in_stranger",
        _CGROUPS,
        {"unshare": ["user", "pid", "mnt", "net", "ipc", "uts"], "init": True},
        says=("2 processes are pid 1 inside",),
    ),
]
"""Faults of `init_identity`."""
