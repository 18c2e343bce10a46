"""A listing and content hashes of a file tree, read without trusting anything in it.

Every entry is opened as an `O_PATH` descriptor below the root (`openat2` with RESOLVE_BENEATH, NO_SYMLINKS,
NO_MAGICLINKS and NO_XDEV): no link is followed, no mount is crossed. What is known to be a regular file by then
is reopened through that same descriptor and read; FIFOs, sockets and devices are never opened.

Sources: openat2(2), open(2) on O_PATH, xattr(7), Linux `Documentation/filesystems/overlayfs.rst`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from drums_core.hashing import hash_content
from drums_core.model import Json

# How an entry is laid out, in this order; what does not apply to its type is None.
FIELDS = ("type", "mode", "uid", "gid", "size", "mtime_ns", "target", "xattrs", "links", "device", "hash")
ROOT = "."

_SYS_OPENAT2 = 437
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x01, 0x02, 0x04, 0x08
_RESOLVE = _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH
_PATH_BYTES = 3000  # of one openat2 call; PATH_MAX is 4096
_INLINE_BYTES = 1 << 16  # smaller files are hashed where they are found
_IN_FLIGHT = 64
_HIDDEN_XATTRS = "trusted.overlay."
_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}
MOUNT = "mount"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def open_beneath(dir_fd: int, path: bytes, flags: int) -> int:
    """openat2(2) of a relative path: beneath the directory, through no link, across no mount.

    Raises:
        OSError: EXDEV for another mount or a way out, ELOOP for a link in it.
    """
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE)
    while True:
        fd: int = _libc.syscall(_SYS_OPENAT2, dir_fd, path, how, len(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: a rename elsewhere raced with ".." resolution
            raise OSError(number, os.strerror(number), os.fsdecode(path))


@contextmanager
def _opened(dir_fd: int, components: tuple[bytes, ...], flags: int) -> Iterator[int]:
    """Open a path of any length below `dir_fd`, in steps that the kernel takes."""
    steps: list[bytes] = []
    for component in components:
        if steps and len(steps[-1]) + len(component) < _PATH_BYTES:
            steps[-1] += b"/" + component
        else:
            steps.append(component)
    current = dir_fd
    try:
        for number, step in enumerate(steps or [b"."]):
            last = number >= len(steps) - 1
            opened = open_beneath(current, step, flags if last else os.O_PATH | os.O_DIRECTORY)
            if current != dir_fd:
                os.close(current)
            current = opened
        yield current
    finally:
        if current != dir_fd:
            os.close(current)


class _Tree:
    def __init__(self, root_fd: int, pool: ThreadPoolExecutor) -> None:
        self.root_fd = root_fd
        self.pool = pool
        self.entries: dict[bytes, list[Json]] = {}
        self.inodes: dict[tuple[int, int], list[bytes]] = {}
        self.hashes: list[tuple[bytes, Future[str]]] = []
        self.in_flight = threading.Semaphore(_IN_FLIGHT)
        self.bytes = 0

    def walk(self) -> None:
        self._entry(self.root_fd, ())
        pending: list[tuple[bytes, ...]] = [()]
        # Paths, not descriptors, are pending: depth and width of the tree cost no descriptors.
        while pending:
            directory = pending.pop()
            try:
                with _opened(self.root_fd, directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
                    for name in sorted(os.fsencode(x) for x in os.listdir(fd)):
                        if self._child(fd, directory, name):
                            pending.append((*directory, name))
            except FileNotFoundError:  # removed since it was listed
                if not directory:
                    raise

    def _child(self, dir_fd: int, directory: tuple[bytes, ...], name: bytes) -> bool:
        """Take one entry down; whether it is a directory to go into."""
        path = (*directory, name)
        try:
            fd = open_beneath(dir_fd, name, os.O_PATH | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        except OSError as e:
            if e.errno != errno.EXDEV:
                raise
            # What is mounted here is not part of the tree; that something is, is.
            self.entries[b"/".join(path)] = [MOUNT, *[None] * (len(FIELDS) - 1)]
            return False
        try:
            return self._entry(fd, path)
        finally:
            os.close(fd)

    def _entry(self, fd: int, path: tuple[bytes, ...]) -> bool:
        status = os.fstat(fd)
        kind = stat.S_IFMT(status.st_mode)
        joined = b"/".join(path) or os.fsencode(ROOT)
        regular, link = kind == stat.S_IFREG, kind == stat.S_IFLNK
        device = None
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            device = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        self.entries[joined] = [
            _TYPES.get(kind, oct(kind)),
            oct(stat.S_IMODE(status.st_mode)),
            status.st_uid,
            status.st_gid,
            status.st_size if regular else None,
            status.st_mtime_ns if regular or link else None,
            os.readlink("", dir_fd=fd) if link else None,
            _xattrs(fd),
            None,
            device,
            None,
        ]
        if kind != stat.S_IFDIR and status.st_nlink > 1:
            self.inodes.setdefault((status.st_dev, status.st_ino), []).append(joined)
        if regular:
            self._hash(fd, joined, status.st_size)
        return kind == stat.S_IFDIR

    def _hash(self, path_fd: int, path: bytes, size: int) -> None:
        # The very object that was looked at, whatever its name leads to by now.
        name = f"/proc/self/fd/{path_fd}"
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags | os.O_NOATIME)
        except PermissionError:  # O_NOATIME is for the owner and the privileged
            fd = os.open(name, flags)
        self.bytes += size
        if size <= _INLINE_BYTES:
            self.entries[path][-1] = _hash_descriptor(fd)
            return
        self.in_flight.acquire()
        self.hashes.append((path, self.pool.submit(self._hash_later, fd)))

    def _hash_later(self, fd: int) -> str:
        try:
            return _hash_descriptor(fd)
        finally:
            self.in_flight.release()

    def finish(self) -> dict[str, Json]:
        for path, future in self.hashes:
            self.entries[path][-1] = future.result()
        links = FIELDS.index("links")
        for group in self.inodes.values():
            if len(group) > 1:  # a single one has its other names outside the tree
                for path in group:
                    self.entries[path][links] = os.fsdecode(min(group))
        return {
            "entries": {os.fsdecode(path): self.entries[path] for path in sorted(self.entries)},
            "count": len(self.entries),
            "bytes": self.bytes,
        }


def _hash_descriptor(fd: int) -> str:
    """The hash of a file's content; closes the descriptor."""
    try:
        return hash_content(fd)
    finally:
        os.close(fd)


def _xattrs(path_fd: int) -> dict[str, str]:
    # An O_PATH descriptor refuses flistxattr; its magic link leads to the very object, a symbolic link included.
    name = f"/proc/self/fd/{path_fd}"
    try:
        names = os.listxattr(name)
    except OSError as e:
        if e.errno == errno.ENOTSUP:
            return {}
        raise
    values = {}
    for key in sorted(names):
        if not key.startswith(_HIDDEN_XATTRS):
            with suppress(FileNotFoundError):
                try:
                    values[key] = os.getxattr(name, key).hex()
                except OSError as e:
                    if e.errno != errno.ENODATA:
                        raise
    return values


def hash_tree(root: int | Path, path: str = "", *, threads: int = 2) -> dict[str, Json]:
    """Listing and hashes of the directory `path` below `root`.

    Paths are those below the directory, bytes that are no UTF-8 as lone surrogates (`os.fsdecode`), `.` is the
    directory itself. A folder's mtime is left out (CRIU makes and removes files of its own), sizes of folders too.
    A mount inside is an entry of type `mount` and is not entered.

    Args:
        root: a directory, or a descriptor of one; the descriptor is left open.
        path: relative to `root`; no component of it may be a link or a mount.
        threads: threads that hash.

    Returns:
        `{"entries": {path: a list as in FIELDS}, "count": entries, "bytes": of file content}`.

    Raises:
        OSError: something cannot be read, `path` leads through a link, or leaves `root`.
    """
    root_fd = root if isinstance(root, int) else os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        components = tuple(os.fsencode(x) for x in Path(path).parts if x != "/")
        if ".." in Path(path).parts:
            raise ValueError(f"the path {path!r} leads out of the tree")
        with _opened(root_fd, components, os.O_PATH | os.O_DIRECTORY) as fd, ThreadPoolExecutor(threads) as pool:
            tree = _Tree(fd, pool)
            tree.walk()
            return tree.finish()
    finally:
        if root_fd != root:
            os.close(root_fd)


def diff_trees(expected: Json, observed: Json) -> list[str]:
    """How two results of `hash_tree` differ, in words, by path; empty when they are equal."""
    wanted, have = expected["entries"], observed["entries"]
    found = []
    for path in sorted({*wanted, *have}):
        if path not in have:
            found.append(f"{path!r} is missing ({wanted[path][0]})")
        elif path not in wanted:
            found.append(f"{path!r} is extra ({have[path][0]})")
        elif list(wanted[path]) != list(have[path]):
            changes = [
                f"{field} {new!r}, expected {old!r}"
                for field, old, new in zip(FIELDS, wanted[path], have[path], strict=True)
                if old != new
            ]
            found.append(f"{path!r} has {'; '.join(changes)}")
    return found
