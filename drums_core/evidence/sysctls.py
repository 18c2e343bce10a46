"""The sysctls of a network namespace: what can be set in it, and so could be lost.

What a namespace cannot set shows the host's value and is left out, and so is what the kernel counts or makes up.

Sources: the kernel's `networking/ip-sysctl.rst`, `net/core/net_namespace.c`, `net/sysctl_net.c`.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

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
        with os.scandir(f"{_TOP}/{folder}") as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{name}/")
                elif entry.name not in _LEFT_OUT and entry.stat(follow_symlinks=False).st_mode & stat.S_IWUSR:
                    with suppress(FileNotFoundError):  # of an interface that has just gone
                        found[name] = _read(f"{_TOP}/{name}")
    return found


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return " ".join(os.read(fd, _MOST_BYTES).decode(errors="replace").split())
    finally:
        os.close(fd)
