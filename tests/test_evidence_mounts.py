"""The mount table, normalised."""

from __future__ import annotations

import os

import pytest

from drums_core.evidence.mounts import difference, parse_mountinfo, read_mounts

SOURCE = rb"""541 540 0:6 / / rw,relatime - overlay a rw,lowerdir+=/,upperdir=/a\134,b,workdir=/,index=on,nfs_export=on
542 541 0:63 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
543 541 0:25 / /dev ro,nosuid,relatime shared:12 - tmpfs drums-dev rw,mode=755
544 543 0:64 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,mode=620,ptmxmode=666
545 543 0:65 / /dev/shm rw,nosuid,nodev master:4 propagate_from:2 - tmpfs tmpfs rw,uid=1000000
546 541 0:66 / /tmp rw,nosuid,nodev,relatime - tmpfs tmpfs rw
547 546 0:67 / /tmp/a\040b\012c rw - tmpfs tmpfs rw
"""
COPY = rb"""741 700 0:82 / / rw,relatime - overlay b rw,lowerdir+=/,lowerdir+=/c1,upperdir=/b/u,index=on,nfs_export=on
742 741 0:83 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
743 741 0:25 / /dev ro,nosuid,relatime shared:90 - tmpfs drums-dev rw,mode=755
744 743 0:84 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,mode=620,ptmxmode=666
745 743 0:85 / /dev/shm rw,nosuid,nodev master:41 propagate_from:20 - tmpfs tmpfs rw,uid=1000000
746 741 0:86 / /tmp rw,nosuid,nodev,relatime - tmpfs tmpfs rw
747 746 0:87 / /tmp/a\040b\012c rw - tmpfs tmpfs rw
"""


def test_a_copy_is_equal() -> None:
    """Ids, device numbers, peer groups, the overlay's layers and label do not count."""
    source, copy = parse_mountinfo(SOURCE), parse_mountinfo(COPY)
    assert source == copy
    assert difference(source, copy) == []
    assert source[0]["super"] == "rw,index=on,nfs_export=on"
    assert source[0]["parent"] == ""
    assert source[3]["parent"] == "/dev"
    assert source[4]["propagation"] == ["master", "propagate_from"]
    assert source[6]["mount_point"] == "/tmp/a b\nc"
    assert source[6]["parent"] == "/tmp"


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (b"/dev ro,", b"/dev rw,", "options"),
        (b"nfs_export=on", b"nfs_export=off", "super"),
        (b"shared:90", b"", "propagation"),
        (b"743 741 0:25 / /dev", b"743 741 0:25 /sub /dev", "root"),
        (b"747 746", b"747 741", "parent"),
        (b"tmpfs drums-dev", b"devtmpfs drums-dev", "type"),
        (b"746 741 0:86 / /tmp rw,nosuid,nodev,relatime - tmpfs tmpfs rw\n", b"", "'/tmp' (tmpfs) is missing"),
        (b"742 741", b"799 741 0:99 / /mnt rw - tmpfs tmpfs rw\n742 741", "'/mnt' (tmpfs) is extra"),
    ],
)
def test_each_difference_is_named(old: bytes, new: bytes, word: str) -> None:
    """Any change of the table is reported by mount point and field."""
    changed = COPY.replace(old, new, 1).replace(b"relatime  - ", b"relatime - ")
    assert changed != COPY
    found = difference(parse_mountinfo(SOURCE), parse_mountinfo(changed))
    assert any(word in x for x in found), found


def test_order_counts() -> None:
    """The same mounts in another order are another table."""
    lines = COPY.splitlines(keepends=True)
    lines[1], lines[2] = lines[2], lines[1]
    found = difference(parse_mountinfo(SOURCE), parse_mountinfo(b"".join(lines)))
    assert len(found) == 1 and "order" in found[0]


def test_an_overmount_is_a_second_mount_there() -> None:
    """Two mounts on one point are told apart."""
    twice = COPY + b"750 746 0:99 / /tmp rw - tmpfs evil rw\n"
    assert difference(parse_mountinfo(SOURCE), parse_mountinfo(twice)) == ["'/tmp' (mount 2 there) (tmpfs) is extra"]


@pytest.mark.parametrize("data", [b"", b"1 2 3\n", b"1 2 0:1 / / rw shared:1 tmpfs tmpfs rw\n"])
def test_what_is_no_mount_table_is_an_error(data: bytes) -> None:
    """Unreadable evidence raises; it never compares as equal."""
    with pytest.raises(ValueError):
        parse_mountinfo(data)


def test_own_table_reads() -> None:
    """The kernel's own file parses, and twice to the same."""
    table = read_mounts(os.getpid())
    assert table == read_mounts(os.getpid())
    assert any(x["mount_point"] == "/proc" and x["type"] == "proc" for x in table)
