"""The mount table: one more, one less, other options, other propagation, another root, another order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drums_core.testing.faults.model import PLANT, Fault, Need, Point


def _fault(name: str, about: str, action: str, arguments: Mapping[str, Any], *says: str, staged: bool = False) -> Fault:
    needs = frozenset({Need.STAGE}) if staged else frozenset()
    full = f"mount_table:{name}" if name else "mount_table"
    file = PLANT / "mounts.py"
    return Fault(full, ("mount_table",), Point.PRE_RESUME, about, action, file, arguments, needs=needs, says=says)


_SHM = {"where": "/dev/shm"}

MOUNT_FAULTS = [
    _fault("", "a tmpfs is mounted inside", "mount_tmpfs", {"where": "/mnt"}, "/mnt", "tmpfs", "extra"),
    _fault("bind", "a folder is bound to another place", "bind", {"what": "/etc", "where": "/mnt"}, "/mnt", "extra"),
    _fault("over", "a tmpfs is mounted over another one", "mount_tmpfs", _SHM, "'/dev/shm' (mount 2 there)", "extra"),
    _fault("less", "a mount is gone", "unmount", _SHM, "'/dev/shm' (tmpfs) is missing"),
    _fault("read-only", "a mount is read-only", "change_options", {**_SHM, "add": ["ro"]}, "/dev/shm", "'ro,"),
    _fault(
        "read-write",
        "a read-only mount is writable",
        "change_options",
        {"where": "/srv", "drop": ["ro"]},
        "'/srv'",
        "'rw,",
        staged=True,
    ),
    _fault("suid", "nosuid is gone from a mount", "change_options", {**_SHM, "drop": ["nosuid"]}, "'rw,nodev,"),
    _fault("dev", "nodev is gone from a mount", "change_options", {**_SHM, "drop": ["nodev"]}, "'rw,nosuid,relatime'"),
    _fault("noexec", "a mount has become noexec", "change_options", {**_SHM, "add": ["noexec"]}, "noexec"),
    _fault("size", "a tmpfs holds one page more", "change_size", _SHM, "size=524292k"),
    _fault("shared", "a mount is shared", "change_propagation", {**_SHM, "to": "shared"}, "propagation ['shared']"),
    _fault("unbindable", "a mount is unbindable", "change_propagation", {**_SHM, "to": "unbindable"}, "unbindable"),
    _fault(
        "root", "a folder of a file system is mounted in place of the whole", "other_root", _SHM, "root '/drums-fault'"
    ),
    _fault("order", "a mount is the last of the table, and was not", "mount_anew", _SHM, "the order is"),
    _fault(
        "order-of-overmounts",
        "two mounts at one place are over each other in the other order",
        "swap",
        {"where": "/mnt"},
        "'/mnt' has super",
        "'/mnt' (mount 2 there) has super",
        staged=True,
    ),
]
"""Faults of `mount_table`."""
