"""A mount table that is not as it was.

Made with the host's rights in the desktop's mount namespace, so that no flag is locked.

Sources: mount(2), umount(2), mount_namespaces(7), proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from drums_core.sys import enter
from drums_core.testing.plant.target import Target

_MS_REMOUNT, _MS_BIND, _MS_MOVE = 0x20, 0x1000, 0x2000
_PROPAGATION = {"shared": 1 << 20, "slave": 1 << 19, "private": 1 << 18, "unbindable": 1 << 17}
_PAGE_K = 4


def _enter(target: Target) -> None:
    enter.setns(target.namespace("mnt"), "mnt")


def _row(target: Target, where: str) -> tuple[str, str, str]:
    """Type, mount options and super options of the topmost mount at a place."""
    for line in reversed(Path(f"/proc/{target.pid1}/mountinfo").read_text().splitlines()):
        words = line.split()
        if words[4] == where:
            after = words.index("-")
            return words[after + 1], words[5], words[after + 3]
    raise LookupError(f"nothing is mounted at {where}")


def mount_tmpfs(target: Target, where: str, sizes_k: Sequence[int] = (64,), read_only: bool = False) -> None:
    """Mount a tmpfs of each of these sizes inside, one over the other."""
    root = os.stat(f"/proc/{target.pid1}/root").st_uid
    _enter(target)
    for size in sizes_k:
        _tmpfs(where, size, root, ["ro"] if read_only else [])


def _tmpfs(where: str, size_k: int, root: int, flags: Sequence[str] = ()) -> None:
    data = f"size={size_k}k,uid={root},gid={root}"  # as if the desktop's own root had made it
    enter.mount("drums-fault", where, "tmpfs", ["nosuid", "nodev", *flags], data)


def bind(target: Target, what: str, where: str) -> None:
    """Bind a folder inside to another place."""
    _enter(target)
    enter.mount(what, where, None, ["bind"])


def unmount(target: Target, where: str) -> None:
    """Take a mount away; whoever has it open keeps it."""
    _enter(target)
    enter.umount(where)


def swap(target: Target, where: str) -> None:
    """Put the two tmpfs of different sizes at a place, one over the other, in the other order."""
    sizes = []
    for line in Path(f"/proc/{target.pid1}/mountinfo").read_text().splitlines():
        words = line.split()
        if words[4] == where:
            sizes.append(int(words[-1].partition("size=")[2].partition("k")[0]))
    if len(sizes) != 2:
        raise LookupError(f"{len(sizes)} mounts at {where}, there should be two")
    root = os.stat(f"/proc/{target.pid1}/root").st_uid
    _enter(target)
    for _ in sizes:
        enter.umount(where)
    for size in reversed(sizes):
        _tmpfs(where, size, root)


def mount_anew(target: Target, where: str) -> None:
    """Take a tmpfs away and mount one with the same options there, which makes it the last of the table."""
    kind, options, super_options = _row(target, where)
    _enter(target)
    enter.umount(where)
    flags = [x for x in options.split(",") if x in enter.MOUNT_FLAGS]
    data = ",".join(x for x in super_options.split(",") if x not in ("rw", "ro"))
    enter.mount("tmpfs", where, kind, flags, data)


def other_root(target: Target, where: str) -> None:
    """Show a folder of a file system in place of the whole of it, at the same place and with the same options."""
    _, options, _ = _row(target, where)
    flags = [x for x in options.split(",") if x in enter.MOUNT_FLAGS]
    fds = [(target.namespace(kind), kind) for kind in ("user", "mnt")]
    for fd, kind in fds:  # as its own root: nobody else may make a folder there
        enter.setns(fd, kind)
    enter.set_ids(0, 0, [])
    inner = f"{where}/drums-fault"
    os.mkdir(inner)
    enter.mount(inner, "/media", None, ["bind"])
    enter.umount(where)
    enter.mount("/media", where, None, ["bind"])
    enter.umount("/media")
    enter.mount(None, where, None, ["remount", "bind", *flags])


def change_options(target: Target, where: str, add: Sequence[str] = (), drop: Sequence[str] = ()) -> None:
    """Mount it anew in place with some options more or less (`ro`, `nosuid`, `nodev`, `noexec`)."""
    _, options, _ = _row(target, where)
    flags = [x for x in options.split(",") if x in enter.MOUNT_FLAGS and x not in drop]
    _enter(target)
    enter.mount(None, where, None, ["remount", "bind", *flags, *add])


def change_size(target: Target, where: str) -> None:
    """Let a tmpfs hold one page more."""
    kind, options, super_options = _row(target, where)
    size = int(super_options.partition("size=")[2].partition("k")[0])
    flags = [x for x in options.split(",") if x in enter.MOUNT_FLAGS]
    _enter(target)
    enter.mount(None, where, kind, ["remount", *flags], f"size={size + _PAGE_K}k")


def change_propagation(target: Target, where: str, to: str) -> None:
    """Let a mount be shared, or unbindable."""
    _enter(target)
    result = enter.libc.mount(None, os.fsencode(where), None, _PROPAGATION[to], None)
    enter.checked(result, f"mount --make-{to} {where}")
