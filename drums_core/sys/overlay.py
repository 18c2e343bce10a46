"""Mounting a desktop's files: an overlay over read-only layers that never get a path of their own.

The lower layers are detached clones (`open_tree`), read-only, and id-mapped where they lie with plain ids on
disk; the overlay takes them by descriptor. So no path leads into a layer, and no removal can reach one.
`index=on,nfs_export=on` lets CRIU open the file handles of inotify watches.

Kernels before 6.13 (Debian 12 has 6.1, Debian 13 has 6.12) take no layer by descriptor. There the clones get paths
in a private folder beside the target, for as long as one mount(2) takes; the overlay keeps clones of its own.

Sources: the kernel's `filesystems/overlayfs.rst`, mount_setattr(2), fsopen(2), fsconfig(2), open_tree(2), mount(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from drums_core.sys.enter import checked, libc, mount

# x86-64 system call numbers (arch/x86/entry/syscalls/syscall_64.tbl).
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_AT_FDCWD = -100
_OPEN_TREE_CLONE, _O_CLOEXEC, _AT_EMPTY_PATH = 1, 0x80000, 0x1000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_IDMAP = 0x1, 0x2, 0x4, 0x100000
_SET_STRING, _SET_FD, _CMD_CREATE = 1, 5, 6
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _MOVE_F_EMPTY_PATH = 1, 1, 4
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
# What fsconfig(2) answers where overlayfs does not know the new mount API yet (before 6.5), and where it takes
# `lowerdir+` as a string alone or not at all.
_NO_DESCRIPTORS = (errno.EOPNOTSUPP, errno.EINVAL)
_OPTIONS_LIMIT = 4095  # mount(2) copies one page, and ends it with a NUL

# Without redirect_dir a folder that lies in a lower layer cannot be renamed: rename(2) says EXDEV, and so would most of
# what an agent finds in its home.
OPTIONS = {"index": "on", "nfs_export": "on", "redirect_dir": "on"}


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


def clone_tree(path: Path, idmap_fd: int | None, *, bare: bool = False) -> int:
    """A detached read-only clone of the mount of a directory or a file.

    Args:
        idmap_fd: a user namespace that id-maps it, or None.
        bare: without set-id programs and devices.
    """
    fd = checked(
        libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | _O_CLOEXEC), f"open_tree {path}"
    )
    attributes = _ATTR_RDONLY | (0 if idmap_fd is None else _ATTR_IDMAP) | (_ATTR_NOSUID | _ATTR_NODEV if bare else 0)
    request = struct.pack("QQQQ", attributes, 0, 0, idmap_fd or 0)
    try:
        checked(libc.syscall(_MOUNT_SETATTR, fd, b"", _AT_EMPTY_PATH, request, len(request)), f"mount_setattr {path}")
    except OSError:
        os.close(fd)
        raise
    return fd


class _NoDescriptors(OSError):
    """The kernel did not take a lower layer by descriptor."""


def mount_overlay(target: Path, layers: Sequence[Layer], upper: Path, work: Path, idmap_fd: int) -> None:
    """Mount an overlay on `target`.

    Blocks. After a failure nothing is left, mount or folder.

    Args:
        target: a folder whose parent belongs to the caller.
        layers: the lower layers, topmost first.
        upper: the upper layer, and
        work: the work folder beside it.
        idmap_fd: a user namespace whose maps are the desktop's.

    Raises:
        OSError: the kernel refused; the text quotes the overlay's own message where there is one.
    """
    try:
        _mount_by_descriptors(target, layers, upper, work, idmap_fd)
    except _NoDescriptors as refused:
        try:
            _mount_by_paths(target, layers, upper, work, idmap_fd)
        except OSError as e:
            e.add_note(f"by descriptor: {refused}")
            raise


def _mount_by_descriptors(target: Path, layers: Sequence[Layer], upper: Path, work: Path, idmap_fd: int) -> None:
    with ExitStack() as stack:
        fs = checked(libc.syscall(_FSOPEN, b"overlay", _FSOPEN_CLOEXEC), "fsopen overlay")
        stack.callback(os.close, fs)

        def configure(command: int, key: str | None, value: str | None, aux: int, what: str) -> None:
            encode = [None if x is None else x.encode() for x in (key, value)]
            if libc.syscall(_FSCONFIG, fs, command, *encode, aux) < 0:
                number = ctypes.get_errno()
                kind = _NoDescriptors if command == _SET_FD and number in _NO_DESCRIPTORS else OSError
                raise kind(number, f"overlay on {target}: {what}: {os.strerror(number)}; {_messages(fs)}")

        for layer in layers:
            tree = clone_tree(layer.path, None if layer.shifted else idmap_fd)
            stack.callback(os.close, tree)
            configure(_SET_FD, "lowerdir+", None, tree, f"lower layer {layer.path}")
        # By descriptor as well: fsconfig(2) takes no string of more than 255 bytes.
        for key, path in (("upperdir", upper), ("workdir", work)):
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            configure(_SET_FD, key, None, fd, f"{key} {path}")
        for key, value in OPTIONS.items():
            configure(_SET_STRING, key, value, 0, f"option {key}={value}")
        configure(_CMD_CREATE, None, None, 0, "create")
        mounted = checked(libc.syscall(_FSMOUNT, fs, _FSMOUNT_CLOEXEC, 0), "fsmount overlay")
        stack.callback(os.close, mounted)
        attach_tree(mounted, target)


def _mount_by_paths(target: Path, layers: Sequence[Layer], upper: Path, work: Path, idmap_fd: int) -> None:
    with ExitStack() as undo, ExitStack() as stack:
        # Only ever emptied by rmdir(2), which refuses a mount point and whatever is not empty.
        folder = Path(tempfile.mkdtemp(prefix="lower-", dir=target.parent))
        stack.callback(_remove_folder, folder)
        places = [folder / str(number) for number in range(len(layers))]
        options = _options(places, upper, work)
        for place, layer in zip(places, layers, strict=True):
            os.mkdir(place, 0o700)
            stack.callback(_remove_folder, place)
            tree = clone_tree(layer.path, None if layer.shifted else idmap_fd)
            try:
                attach_tree(tree, place)
            finally:
                os.close(tree)
            stack.callback(_detach, place)
        mount("overlay", str(target), "overlay", [], options)
        undo.callback(_detach, target)
        stack.close()  # no path leads into a layer from here on
        undo.pop_all()


def _options(lowers: Sequence[Path], upper: Path, work: Path) -> str:
    """The option string of mount(2).

    Raises:
        OSError: E2BIG, with observed against allowed.
    """
    text = ",".join(
        (
            f"lowerdir={':'.join(map(_escaped, lowers))}",
            f"upperdir={_escaped(upper)}",
            f"workdir={_escaped(work)}",
            *(f"{key}={value}" for key, value in OPTIONS.items()),
        )
    )
    if (size := len(os.fsencode(text))) > _OPTIONS_LIMIT:
        raise OSError(
            errno.E2BIG,
            f"an overlay of {len(lowers)} layers needs {size} bytes of options, this kernel takes {_OPTIONS_LIMIT}: "
            "use fewer layers, a shorter path of the state folder, or Linux 6.13 or newer",
        )
    return text


def _escaped(path: Path) -> str:
    r"""A path in overlayfs's options: `,` ends an option, `:` a layer, and `\` takes the meaning of both away."""
    return re.sub(r"([\\,:])", r"\\\1", str(path))


def attach_tree(tree: int, place: Path) -> None:
    """Give a detached mount a path."""
    checked(
        libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(place), _MOVE_F_EMPTY_PATH),
        f"move_mount to {place}",
    )


def _detach(place: Path) -> None:
    """Take a mount's path away; who holds it open, or a clone of it, keeps it."""
    checked(libc.umount2(os.fsencode(place), _MNT_DETACH | _UMOUNT_NOFOLLOW), f"umount {place}")


def _remove_folder(place: Path) -> None:
    try:
        os.rmdir(place)
    except OSError as e:
        if e.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        # The echo of a mount below it that could not be taken away, which is what gets raised.


def _messages(fs: int) -> str:
    try:
        return os.read(fs, 4096).decode(errors="replace").strip()
    except OSError:
        return "no message from the kernel"
