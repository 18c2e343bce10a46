"""The cgroup: processes outside, strangers inside, and limits that are off by one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drums_core.testing.faults.model import PLANT, Fault, Need, Point

_OWN = ["user", "pid", "mnt", "net", "ipc", "uts"]


def _fault(
    name: str,
    about: str,
    action: str,
    arguments: Mapping[str, Any],
    *says: str,
    also: tuple[str, ...] = (),
    needs: frozenset[Need] = frozenset(),
    file: str = "cgroups.py",
) -> Fault:
    gates = ("cgroup", *also)
    return Fault(name, gates, Point.PRE_RESUME, about, action, PLANT / file, arguments, needs=needs, says=says)


_OTHER = frozenset({Need.OTHER})

CGROUP_FAULTS = [
    _fault(
        "cgroup",
        "the memory limit is one page less",
        "change_memory_limit",
        {"pages": -1},
        "memory_bytes is 4294963200, expected 4294967296",
    ),
    _fault(
        "cgroup:memory-more", "the memory limit is one page more", "change_memory_limit", {"pages": 1}, "4294971392"
    ),
    _fault("cgroup:swap", "there is one page of swap", "change_swap_limit", {"pages": 1}, "swap_bytes is 4096"),
    _fault("cgroup:pids-less", "one process less is allowed", "change_pids_limit", {"by": -1}, "pids is 2047"),
    _fault("cgroup:pids-more", "one process more is allowed", "change_pids_limit", {"by": 1}, "pids is 2049"),
    _fault(
        "cgroup:cpu",
        "the CPU quota is a thousandth of a core more",
        "change_cpu_limit",
        {"quota_us": 100},
        "cpus is 2.001, expected 2.0",
    ),
    _fault("cgroup:cpu-less", "the CPU quota is 2 us less", "change_cpu_limit", {"quota_us": -2}, "cpus is 1.99998"),
    _fault("cgroup:cpu-unlimited", "there is no CPU quota", "change_cpu_limit", {"quota_us": 0}, "cpus is unlimited"),
    _fault(
        "cgroup:moved-out",
        "a process of the desktop is in another cgroup",
        "move_out",
        {"command": "openbox"},
        "1 processes of the desktop are not in",
    ),
    _fault(
        "cgroup:moved-out-of-pids",
        "a process of the desktop is in another cgroup of one controller",
        "move_out",
        {"command": "openbox", "controller": "pids"},
        "1 processes of the desktop are not in",
    ),
    _fault(
        "cgroup:moved-below",
        "a process of the desktop is in a cgroup below the desktop's",
        "move_below",
        {"command": "openbox"},
        "1 processes of the desktop are not in",
    ),
    _fault(
        "cgroup:moved-to-other",
        "a process of the desktop is in another desktop's cgroup",
        "move_to_other",
        {"command": "openbox"},
        "1 processes of the desktop are not in",
        needs=_OTHER,
    ),
    _fault(
        "cgroup:wrong-parent",
        "the whole desktop is in a cgroup of its name below another parent",
        "move_to_other_parent",
        {"parent": "drums-astray"},
        "processes of the desktop are not in",
    ),
    _fault(
        "cgroup:stranger",
        "a stranger, in namespaces of its own, is in the desktop's cgroup",
        "move_in_stranger",
        {"unshare": _OWN},
        "1 strangers are in",
    ),
    _fault(
        "cgroup:host-process",
        "a process of the host, in the host's namespaces, is in the desktop's cgroup",
        "move_in_stranger",
        {"unshare": []},
        "1 strangers are in",
        also=("isolation",),
    ),
    _fault(
        "cgroup:stranger-of-other",
        "a process in another desktop's namespaces is in the desktop's cgroup",
        "add_process",
        {"kinds": ["pid", "net", "ipc", "uts", "mnt", "user"], "whose": "other"},
        "1 strangers are in",
        also=("isolation",),
        needs=_OTHER,
        file="isolation.py",
    ),
]
"""Faults of `cgroup`."""
