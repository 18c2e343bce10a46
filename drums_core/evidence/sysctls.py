"""The sysctls of a network namespace: what can be set in it, and so could be lost.

What a namespace cannot set shows the host's value and is left out, and so is what the kernel counts or makes up.

Sources: the kernel's `networking/ip-sysctl.rst`, `net/core/net_namespace.c`, `net/sysctl_net.c`.
"""

from __future__ import annotations

import os
import stat

from drums_core.model import Json

_TOP = "/proc/sys/net"
# Written to act, made up by the kernel for each namespace, or a secret that reads as an error.
_LEFT_OUT = frozenset({"flush", "stable_secret", "tcp_fastopen_key", "fib_multipath_hash_seed", "nf_conntrack_count"})
_MOST_BYTES = 1 << 12


def read_sysctls() -> dict[str, Json]:
    """Name below `net/` -> value, of the calling thread's network namespace."""
    found: dict[str, Json] = {}
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            top = os.open(f"{_TOP}/{folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # of an interface that has just gone
            continue
        try:
            with os.scandir(top) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(f"{folder}{entry.name}/")
                    elif entry.name not in _LEFT_OUT and (value := _read(top, entry.name)) is not None:
                        found[f"{folder}{entry.name}"] = value
        finally:
            os.close(top)
    return found


def _read(top: int, name: str) -> str | None:
    """A value, in single blanks; None for what cannot be set."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=top)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        if not os.fstat(fd).st_mode & stat.S_IWUSR:
            return None
        return " ".join(os.read(fd, _MOST_BYTES).decode(errors="replace").split())
    finally:
        os.close(fd)
