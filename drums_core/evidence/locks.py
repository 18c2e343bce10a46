"""The file locks of a desktop, from fdinfo.

`/proc/locks` is no source: it has no descriptors, shows other desktops' OFD locks (owner -1), and names files by
device and inode, which differ between a desktop and its copy. It is the only place that shows a *blocked* waiter,
though; waiters are left out: a waiter is a process in the middle of `fcntl(F_SETLKW)`, which CRIU restarts with the
process, and it holds nothing.

Sources: proc(5), Linux `fs/locks.c` (`show_fd_locks`), CRIU `criu/files-reg.c` (names of deleted files).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from drums_core.model import Json
from drums_core.sys.file_locks import inner_pid, process_locks

FIELDS = ("pid", "fd", "path", "kind", "access", "start", "end", "state")
_DELETED = " (deleted)"
# A deleted file whose name is taken again is given a name of CRIU's own for the moment of its opening.
_CRIU_NAME = re.compile(r"(\.cr_link|\.cr\.[0-9a-f]+\.ghost)+$")


def normalise_path(target: str) -> str:
    """A descriptor's `readlink` as it is equal in a desktop and its copy."""
    if target.endswith(_DELETED):
        return _CRIU_NAME.sub("", target.removesuffix(_DELETED)) + _DELETED
    return target


def read_locks(pids: Iterable[int]) -> list[list[Json]]:
    """The lock entries of these processes, sorted; compare them as multisets (`multisets.difference`).

    Each is a list of `FIELDS`: the pid inside, the descriptor, the file's path inside, `POSIX`, `OFDLCK`, `FLOCK` or
    `LEASE`, `READ` or `WRITE`, first and last byte (`EOF`), and the state. A lock shows at every descriptor that
    shares its open file description, in every process.
    """
    found: list[list[Json]] = []
    for pid in pids:
        locks = process_locks(pid)
        if not locks:
            continue
        try:
            owner = inner_pid(pid)
            for x in locks:
                path = normalise_path(os.readlink(f"/proc/{pid}/fd/{x.fd}"))
                found.append([owner, x.fd, path, x.kind, x.access, x.start, x.end, x.state])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


def describe(entry: Iterable[Json]) -> str:
    """One entry in words."""
    pid, fd, path, kind, access, start, end, _ = entry
    return f"{kind} {access} {start}..{end} on {path!r} (pid {pid}, descriptor {fd})"
