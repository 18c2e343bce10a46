"""The `/dev` that all desktops of a host share: a tmpfs of the host with device nodes, read-only for everyone.

Device nodes work on it because the host owns it; nobody inside a user namespace can make one. `/dev/pts` and
`/dev/shm` are mount points for each desktop's own.
"""

from __future__ import annotations

import os
from pathlib import Path

from drums_core.sys.enter import mount, umount
from drums_core.sys.userns import FIRST_ID

_NODES = (("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0))
_LINKS = (
    ("ptmx", "pts/ptmx"),
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
)


def mount_devices(path: Path) -> None:
    """Make and fill it at `path`."""
    path.mkdir(parents=True, exist_ok=True)
    mount("drums-dev", str(path), "tmpfs", ["nosuid", "noexec"], f"mode=755,size=64k,uid={FIRST_ID},gid={FIRST_ID}")
    try:
        for name, major, minor in _NODES:
            node = path / name
            os.mknod(node, 0o20666, os.makedev(major, minor))
            os.chmod(node, 0o666)  # the umask does not apply
            os.chown(node, FIRST_ID, FIRST_ID)
        for name in ("pts", "shm", "mqueue"):
            (path / name).mkdir()
            os.chown(path / name, FIRST_ID, FIRST_ID)
        for name, target in _LINKS:
            (path / name).symlink_to(target)
        mount(None, str(path), None, ["remount", "bind", "ro", "nosuid", "noexec"])
    except OSError:
        umount(str(path))
        raise


def mount_scratch(path: Path) -> None:
    """A small private tmpfs, for CRIU's cache."""
    path.mkdir(parents=True, exist_ok=True)
    mount("drums-kdat", str(path), "tmpfs", ["nosuid", "nodev", "noexec"], "mode=700,size=4m")
