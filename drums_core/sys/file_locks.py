"""Putting back the POSIX locks that CRIU loses, before the restored desktop's first instruction.

CRIU sets a process's locks, then maps its files and closes the descriptors that it mapped them from. Closing any
descriptor of a file drops the process's POSIX locks on it (fcntl(2)), so the locks on mapped files are gone:
SQLite's shared-memory files in Chromium, say. At CRIU's `post-restore` notification all tasks still sleep in its
restorer and nothing traces them but the root task; there the missing locks are set in the name of their owners,
by an injected `fcntl` (`drums_core.sys.ptrace`).

Sources: fcntl(2), flock(2), proc(5) on `fdinfo`; CRIU 4.2 `criu/file-lock.c`, `images/file-lock.proto`,
`criu/include/magic.h`.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from drums_core.sys.ptrace import Tracee, traced

_IMAGE_MAGIC = (0x54564319, 0x54323616)  # IMG_COMMON_MAGIC, FILE_LOCKS_MAGIC
_KINDS = {1: "POSIX", 2: "FLOCK", 4: "OFDLCK", 8: "LEASE"}
_ACCESS = {0: "READ", 1: "WRITE", 2: "UNLCK"}
_FIELDS = {1: "flag", 2: "type", 3: "pid", 4: "fd", 5: "start", 6: "len"}
_SYS_FCNTL, _SYS_FLOCK = 72, 73
_SET_COMMAND = {"POSIX": 6, "OFDLCK": 37}  # F_SETLK, F_OFD_SETLK
_FLOCK_OPERATION = {"READ": 1 | 4, "WRITE": 2 | 4}  # LOCK_SH, LOCK_EX, with LOCK_NB
_STRUCT_FLOCK = "hhxxxxqqixxxx"
END_OF_FILE = "EOF"


class LockRestoreError(OSError):
    """A lock of the checkpoint could not be put back: the restore is broken and must not be let run."""


@attrs.frozen(order=True)
class DescriptorLock:
    """A lock as a `lock:` line of fdinfo shows it.

    Args:
        fd: the descriptor that it shows at.
        kind: `POSIX`, `OFDLCK`, `FLOCK`, `LEASE` or `DELEG`.
        access: `READ` or `WRITE` (`UNLCK` for a lease that is being broken).
        start: first byte.
        end: last byte as a number, or `EOF`.
        state: `ADVISORY`; for leases `ACTIVE`, `BREAKING`, `BREAKER`.
    """

    fd: int
    kind: str
    access: str
    start: str
    end: str
    state: str = "ADVISORY"


@attrs.frozen(order=True)
class ImageLock:
    """A lock of CRIU's `filelocks.img`; `pid` is the owner's inside the desktop, `length` 0 reaches to the end."""

    pid: int
    fd: int
    kind: str
    access: str
    start: int
    length: int

    def as_shown(self) -> DescriptorLock:
        """How fdinfo shows it once it is set."""
        end = str(self.start + self.length - 1) if self.length else END_OF_FILE
        return DescriptorLock(self.fd, self.kind, self.access, str(self.start), end)


def parse_lock_line(fd: int, line: str) -> DescriptorLock:
    """One `lock:` line of `/proc/PID/fdinfo/FD`: `lock:\\t1: POSIX  ADVISORY  WRITE 12 00:2a:7 0 EOF`.

    Raises:
        ValueError: another form than the kernel's `lock_get_status` writes.
    """
    words = line.split()
    if len(words) < 8 or words[0] != "lock:":
        raise ValueError(f"not a lock line of fdinfo: {line!r}")
    return DescriptorLock(fd, words[2], words[4], words[-2], words[-1], words[3])


def process_locks(pid: int) -> list[DescriptorLock]:
    """The locks at each descriptor of a process; a descriptor or process that vanishes meanwhile is left out.

    Raises:
        OSError: fdinfo cannot be read for another reason.
    """
    found: list[DescriptorLock] = []
    try:
        names = os.listdir(f"/proc/{pid}/fdinfo")
    except (FileNotFoundError, ProcessLookupError):
        return []
    for name in names:
        try:
            with open(f"/proc/{pid}/fdinfo/{name}", encoding="utf-8", errors="surrogateescape") as f:
                text = f.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "lock:" in text:
            found += [parse_lock_line(int(name), x) for x in text.splitlines() if x.startswith("lock:")]
    return sorted(found)


def inner_pid(pid: int) -> int:
    """The pid that a process has in its own pid namespace; raises FileNotFoundError or ProcessLookupError."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="surrogateescape") as f:
        for line in f:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    raise ProcessLookupError(errno.ESRCH, f"process {pid} has no NSpid")


def image_locks(images_dir: Path) -> list[ImageLock]:
    """The locks that a checkpoint holds, of `filelocks.img`; none when CRIU wrote no such file.

    Raises:
        ValueError: the file is cut short or is none of CRIU's.
    """
    path = images_dir / "filelocks.img"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    if len(data) < 8 or struct.unpack_from("<II", data) != _IMAGE_MAGIC:
        raise ValueError(f"{str(path)!r} does not begin as a file-lock image does")
    locks: list[ImageLock] = []
    position = 8
    while position < len(data):
        if position + 4 > len(data):
            raise ValueError(f"{str(path)!r} is cut short at byte {position}")
        (size,) = struct.unpack_from("<I", data, position)
        entry = data[position + 4 : position + 4 + size]
        if len(entry) != size:
            raise ValueError(f"{str(path)!r} is cut short at byte {position}: {len(entry)} of {size} bytes")
        locks.append(_image_lock(entry, path))
        position += 4 + size
    return locks


def _image_lock(entry: bytes, path: Path) -> ImageLock:
    values = {_FIELDS[number]: value for number, value in _varint_fields(entry, path) if number in _FIELDS}
    try:
        return ImageLock(
            pid=_signed(values["pid"]),
            fd=_signed(values["fd"]),
            kind=_KINDS[values["flag"]],
            access=_ACCESS[values["type"] & 3],
            start=_signed(values["start"]),
            length=_signed(values["len"]),
        )
    except KeyError as e:
        raise ValueError(f"{str(path)!r} holds a lock without or with an unknown {e}: {values}") from e


def _varint_fields(entry: bytes, path: Path) -> Iterator[tuple[int, int]]:
    position = 0
    while position < len(entry):
        pair = []
        for _ in ("key", "value"):
            value = shift = 0
            while True:
                if position >= len(entry) or shift > 63:
                    raise ValueError(f"{str(path)!r} holds a broken lock entry {entry.hex()}")
                byte = entry[position]
                position += 1
                value |= (byte & 0x7F) << shift
                shift += 7
                if not byte & 0x80:
                    break
            pair.append(value)
        if pair[0] & 7:  # all fields of the message are varints
            raise ValueError(f"{str(path)!r} holds a lock entry with wire type {pair[0] & 7}")
        yield pair[0] >> 3, pair[1]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def missing_locks(locks: Sequence[ImageLock], pids: Sequence[int]) -> dict[int, list[ImageLock]]:
    """Host pid -> the locks of the image that its descriptors do not show.

    The comparison is one-sided: descriptors that were inherited or duplicated show more lines than the image has.

    Raises:
        LockRestoreError: an owner is not among the processes.
    """
    by_owner: dict[int, list[ImageLock]] = {}
    for lock in locks:
        by_owner.setdefault(lock.pid, []).append(lock)
    absent = set(by_owner)
    missing: dict[int, list[ImageLock]] = {}
    for pid in pids:
        try:
            owner = inner_pid(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if owner not in by_owner:
            continue
        absent.discard(owner)
        shown = {attrs.evolve(x, state="ADVISORY") for x in process_locks(pid)}
        lost = [x for x in by_owner[owner] if x.as_shown() not in shown]
        if lost:
            missing[pid] = lost
    if absent:
        raise LockRestoreError(
            errno.ESRCH, f"owners of file locks are not among the restored processes: pids inside {sorted(absent)}"
        )
    return missing


def reapply_locks(images_dir: Path, pids: Sequence[int], *, timeout_s: float = 5.0) -> list[ImageLock]:
    """Set the locks of the checkpoint that the restored processes lack. Blocking, all in the calling thread.

    To be called at CRIU's `post-restore` notification. On any error the notification must not be answered and the
    copy must be dropped: the locks are not there.

    Args:
        images_dir: CRIU's images.
        pids: host pids of the restored processes.
        timeout_s: seconds that a process may take for each stop.

    Returns:
        The locks that were put back.

    Raises:
        LockRestoreError: an owner is not there, cannot be traced (CRIU traces pid 1), or a lock was refused.
        ValueError: the image is damaged.
    """
    wanted = image_locks(images_dir)
    missing = missing_locks(wanted, pids)
    for pid, locks in missing.items():
        _put_back(pid, locks, timeout_s)
    if missing and (still := missing_locks(wanted, pids)):
        raise LockRestoreError(errno.EIO, f"file locks are missing after they were put back: {still}")
    return sorted(x for locks in missing.values() for x in locks)


def _put_back(pid: int, locks: Sequence[ImageLock], timeout_s: float) -> None:
    try:
        with traced(pid, timeout_s=timeout_s) as tracee:
            for lock in locks:
                result = _set_lock(tracee, lock)
                if result < 0:
                    raise LockRestoreError(-result, f"{lock} was refused: {os.strerror(-result)}")
    except LockRestoreError:
        raise
    except PermissionError as e:
        raise LockRestoreError(
            errno.EPERM,
            f"process {pid} (pid {locks[0].pid} inside) owns file locks and cannot be traced, tracer "
            f"{_tracer(pid)}: {e.strerror}; a lock on a mapped file that pid 1 holds cannot be put back",
        ) from e
    except OSError as e:
        raise LockRestoreError(e.errno or errno.EIO, f"file locks of process {pid} could not be put back: {e}") from e


def _tracer(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="surrogateescape") as f:
            return next((x.split()[1] for x in f if x.startswith("TracerPid:")), "unknown")
    except OSError:
        return "unknown"


def _set_lock(tracee: Tracee, lock: ImageLock) -> int:
    if lock.kind == "FLOCK" and lock.access in _FLOCK_OPERATION:
        return tracee.call(_SYS_FLOCK, lock.fd, _FLOCK_OPERATION[lock.access])
    if lock.kind not in _SET_COMMAND or lock.access not in ("READ", "WRITE"):
        raise LockRestoreError(errno.EOPNOTSUPP, f"{lock} is of a kind that cannot be put back")
    kind = 0 if lock.access == "READ" else 1  # F_RDLCK, F_WRLCK
    request = struct.pack(_STRUCT_FLOCK, kind, os.SEEK_SET, lock.start, lock.length, 0)
    while True:
        result = tracee.call(_SYS_FCNTL, lock.fd, _SET_COMMAND[lock.kind], tracee.write_scratch(request))
        if result != -errno.EFAULT:
            return result
        tracee.next_scratch()
