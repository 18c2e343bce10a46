"""Mounting a desktop's files: an overlay over read-only layers that never get a path of their own.

The lower layers are detached clones (`open_tree`), read-only, and id-mapped where they lie with plain ids on
disk; the overlay takes them by descriptor. So no path leads into a layer, and no removal can reach one.
`index=on,nfs_export=on` lets CRIU open the file handles of inotify watches.

Sources: the kernel's `filesystems/overlayfs.rst`, mount_setattr(2), fsopen(2), fsconfig(2), open_tree(2).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from drums_core.sys.enter import checked, libc

# x86-64 system call numbers (arch/x86/entry/syscalls/syscall_64.tbl).
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_AT_FDCWD = -100
_OPEN_TREE_CLONE, _O_CLOEXEC, _AT_EMPTY_PATH = 1, 0x80000, 0x1000
_ATTR_RDONLY, _ATTR_IDMAP = 0x1, 0x100000
_SET_STRING, _SET_FD, _CMD_CREATE = 1, 5, 6
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _MOVE_F_EMPTY_PATH = 1, 1, 4

OPTIONS = {"index": "on", "nfs_export": "on"}


@attrs.frozen
class Layer:
    """A read-only layer.

    Args:
        path: its directory on the host.
        shifted: whether its owners on disk are already those of the desktop's user namespace (a frozen upper
            layer is); an image lies with plain ids and is id-mapped.
    """

    path: Path
    shifted: bool


def clone_tree(path: Path, idmap_fd: int | None) -> int:
    """A detached read-only clone of a directory's mount, id-mapped by a user namespace when one is given."""
    fd = checked(
        libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | _O_CLOEXEC), f"open_tree {path}"
    )
    attributes = _ATTR_RDONLY | (0 if idmap_fd is None else _ATTR_IDMAP)
    request = struct.pack("QQQQ", attributes, 0, 0, idmap_fd or 0)
    try:
        checked(libc.syscall(_MOUNT_SETATTR, fd, b"", _AT_EMPTY_PATH, request, len(request)), f"mount_setattr {path}")
    except OSError:
        os.close(fd)
        raise
    return fd


def mount_overlay(target: Path, layers: Sequence[Layer], upper: Path, work: Path, idmap_fd: int) -> None:
    """Mount an overlay on `target`.

    Args:
        layers: the lower layers, topmost first.
        idmap_fd: a user namespace whose maps are the desktop's.

    Raises:
        OSError: the kernel refused; the text quotes the overlay's own message where there is one.
    """
    with ExitStack() as stack:
        fs = checked(libc.syscall(_FSOPEN, b"overlay", _FSOPEN_CLOEXEC), "fsopen overlay")
        stack.callback(os.close, fs)

        def configure(command: int, key: str | None, value: str | None, aux: int, what: str) -> None:
            encode = [None if x is None else x.encode() for x in (key, value)]
            if libc.syscall(_FSCONFIG, fs, command, *encode, aux) < 0:
                number = ctypes.get_errno()
                raise OSError(number, f"overlay on {target}: {what}: {os.strerror(number)}; {_messages(fs)}")

        for layer in layers:
            tree = clone_tree(layer.path, None if layer.shifted else idmap_fd)
            stack.callback(os.close, tree)
            configure(_SET_FD, "lowerdir+", None, tree, f"lower layer {layer.path}")
        configure(_SET_STRING, "upperdir", str(upper), 0, f"upper layer {upper}")
        configure(_SET_STRING, "workdir", str(work), 0, f"work folder {work}")
        for key, value in OPTIONS.items():
            configure(_SET_STRING, key, value, 0, f"option {key}={value}")
        configure(_CMD_CREATE, None, None, 0, "create")
        mounted = checked(libc.syscall(_FSMOUNT, fs, _FSMOUNT_CLOEXEC, 0), "fsmount overlay")
        stack.callback(os.close, mounted)
        checked(
            libc.syscall(_MOVE_MOUNT, mounted, b"", _AT_FDCWD, os.fsencode(target), _MOVE_F_EMPTY_PATH),
            f"move_mount to {target}",
        )


def _messages(fs: int) -> str:
    try:
        return os.read(fs, 4096).decode(errors="replace").strip()
    except OSError:
        return "no message from the kernel"
