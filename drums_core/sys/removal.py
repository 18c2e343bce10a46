"""Removing a directory tree without ever deleting through a mount.

A bind mount of the same file system has the same device number, so device checks do not see it (a trial lost
an image that way). Every descent is an `openat2` that refuses to cross any mount point and any link, and the
mount table is read first.

Sources: openat2(2) (RESOLVE_NO_XDEV, RESOLVE_NO_SYMLINKS), proc(5) (mountinfo).
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from pathlib import Path

from drums_core.sys.enter import checked, libc, umount

_OPENAT2 = 437  # x86-64
_RESOLVE_NO_XDEV, _RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS = 0x01, 0x02, 0x04
_RESOLVE_BENEATH, _RESOLVE_IN_ROOT = 0x08, 0x10
_TRIES = 5  # a process that is just ending (CRIU) may write one file more meanwhile
_RESOLVE_NO_LINKS = _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS


def openat2(dir_fd: int, path: str | bytes, flags: int, resolve: int) -> int:
    """openat2(2) with these RESOLVE flags."""
    how = ctypes.create_string_buffer(struct.pack("QQQ", flags | os.O_CLOEXEC, 0, resolve))
    return checked(libc.syscall(_OPENAT2, dir_fd, os.fsencode(path), how, 24), f"openat2 {path!r}")


def open_beneath(dir_fd: int, path: str | bytes, flags: int) -> int:
    """Open a path below a folder whose content is hostile: no link is followed, nothing above is reached.

    Mounts are crossed (a desktop's `/run` is one).
    """
    return openat2(dir_fd, path, flags, _RESOLVE_BENEATH | _RESOLVE_NO_LINKS)


def mounts_below(path: Path) -> list[str]:
    """Mount points at or below a path in this process's mount namespace, in the order of the mount table."""
    top = os.path.realpath(path)
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        # Octal escapes of mountinfo (proc(5)): space, tab, newline, backslash.
        where = os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1"))
        if where == top or where.startswith(top + "/"):
            found.append(where)
    return found


def unmount_below(path: Path) -> None:
    """Unmount everything at or below a path, innermost first.

    Raises:
        OSError: something is still mounted there.
    """
    for where in reversed(mounts_below(path)):
        umount(where)
    left = mounts_below(path)
    if left:
        raise OSError(errno.EBUSY, f"still mounted below {str(path)!r}: {left!r}")


def remove_tree(path: Path) -> None:
    """Remove a folder and all below it. Nothing below a mount point is touched.

    Raises:
        OSError: EBUSY when anything is mounted at or below it (nothing has been removed then).
    """
    left = mounts_below(path)
    if left:
        raise OSError(errno.EBUSY, f"not removing {str(path)!r}: mounted below it: {left!r}")
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove_entry(parent, os.fsencode(path.name))
    finally:
        os.close(parent)


def _remove_entry(parent: int, name: bytes) -> None:
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    try:
        if stat.S_ISDIR(mode):
            _remove_folder(parent, name)
        else:
            os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return  # another host clears the same leftovers


def _remove_folder(parent: int, name: bytes) -> None:
    for tries_left in reversed(range(_TRIES)):
        folder = openat2(parent, name, os.O_RDONLY | os.O_DIRECTORY, _RESOLVE_NO_XDEV | _RESOLVE_NO_LINKS)
        try:
            for entry in os.listdir(folder):
                _remove_entry(folder, os.fsencode(entry))
        finally:
            os.close(folder)
        try:
            os.rmdir(name, dir_fd=parent)
            return
        except OSError as e:
            if e.errno != errno.ENOTEMPTY or not tries_left:
                raise
