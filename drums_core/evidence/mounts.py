"""A desktop's mount table, from mountinfo.

Normalised to what a copy shares with its source: mount and parent ids become the parent's mount point, device
numbers and peer-group numbers go, and so do the overlay's own layer paths and its source (a mere label).

Sources: proc_pid_mountinfo(5), mount_namespaces(7), Linux `fs/proc_namespace.c` and `fs/overlayfs/params.c`.
"""

from __future__ import annotations

import os
import re

from drums_core.model import Json

_OCTAL = re.compile(rb"\\([0-7]{3})")
_COMMA = re.compile(rb"(?<!\\134),")  # a comma inside an overlay's layer path is escaped by a backslash
_LAYER_OPTIONS = ("lowerdir=", "lowerdir+=", "datadir+=", "upperdir=", "workdir=")


def unescape(field: bytes) -> str:
    """A field of mountinfo with its octal escapes undone."""
    return os.fsdecode(_OCTAL.sub(lambda m: bytes([int(m[1], 8) & 0xFF]), field))


def read_mounts(pid: int) -> list[dict[str, Json]]:
    """The normalised mount table of a process, in the kernel's order.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
        ValueError: a line is not what the kernel documents.
    """
    with open(f"/proc/{pid}/mountinfo", "rb") as f:
        return parse_mountinfo(f.read())


def parse_mountinfo(data: bytes) -> list[dict[str, Json]]:
    """`read_mounts` of a file's content; see there."""
    rows = [line.split(b" ") for line in data.splitlines()]
    if not rows:
        raise ValueError("the mount table is empty")
    for row in rows:
        if len(row) < 10 or b"-" not in row[6:] or len(row) - row.index(b"-", 6) < 4:
            raise ValueError(f"not a line of mountinfo: {b' '.join(row)!r}")
    point_of = {row[0]: unescape(row[4]) for row in rows}
    table: list[dict[str, Json]] = []
    for row in rows:
        separator = row.index(b"-", 6)
        fs_type, source, super_options = (unescape(row[separator + 1]), row[separator + 2], row[separator + 3])
        options = [unescape(x) for x in _COMMA.split(super_options)]
        table.append(
            {
                "mount_point": unescape(row[4]),
                "parent": point_of.get(row[1], ""),
                "root": unescape(row[3]),
                "type": fs_type,
                "source": "" if fs_type == "overlay" else unescape(source),
                "options": unescape(row[5]),
                "super": ",".join(x for x in options if not x.startswith(_LAYER_OPTIONS)),
                "propagation": [unescape(x).partition(":")[0] for x in row[6:separator]],
            }
        )
    return table


def difference(expected: Json, observed: Json) -> list[str]:
    """How two mount tables differ, in words; empty when they are equal, order included."""
    if expected == observed:
        return []
    found: list[str] = []
    wanted, have = _by_point(expected), _by_point(observed)
    for key in [*wanted, *(x for x in have if x not in wanted)]:
        point, layer = key
        name = f"{point!r}" + (f" (mount {layer + 1} there)" if layer else "")
        if key not in have:
            found.append(f"{name} ({wanted[key]['type']}) is missing")
        elif key not in wanted:
            found.append(f"{name} ({have[key]['type']}) is extra")
        else:
            for field, value in wanted[key].items():
                if have[key].get(field) != value:
                    found.append(f"{name} has {field} {have[key].get(field)!r}, expected {value!r}")
    if not found:
        order = [x["mount_point"] for x in observed]
        found.append(f"the order is {order}, expected {[x['mount_point'] for x in expected]}")
    return found


def _by_point(table: Json) -> dict[tuple[str, int], dict[str, Json]]:
    keyed: dict[tuple[str, int], dict[str, Json]] = {}
    for row in table:
        layer = 0
        while (row["mount_point"], layer) in keyed:
            layer += 1
        keyed[row["mount_point"], layer] = row
    return keyed
