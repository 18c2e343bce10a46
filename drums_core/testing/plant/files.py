"""A home directory that is not as it was: changed on the host's side, through the desktop's mounted tree."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drums_core.testing.plant.target import Target

HOME = "home/user"
STAGE = "stage"


def change_home(target: Target, how: str) -> None:
    """Change the home's first file: `append` a byte, `flip` a bit (times kept), change its `owner`; or `add` a file."""
    home = target.root / HOME
    if how == "add":
        (home / "planted").write_bytes(b"")
        return
    path = next(p for p in sorted(home.iterdir()) if stat.S_ISREG(p.lstat().st_mode) and p.lstat().st_size)
    if how == "owner":
        os.chown(path, path.lstat().st_uid + 1, -1, follow_symlinks=False)
    elif how == "append":
        _append(path)
    else:
        _flip(path, 0)


def _append(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    os.pwrite(fd, b"\n", os.fstat(fd).st_size)
    os.close(fd)


def _flip(path: Path, at: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    info = os.fstat(fd)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))
    os.close(fd)


def _copy(source: Path, target: Path) -> None:
    """A file of its own with the same content, owner, mode and times."""
    info = source.lstat()
    shutil.copyfile(source, target)
    os.chown(target, info.st_uid, info.st_gid)
    shutil.copystat(source, target)


def _turn_into_copy(stage: Path) -> None:
    (stage / "hard b").unlink()
    _copy(stage / "hard a", stage / "hard b")


def _turn_into_link(stage: Path) -> None:
    (stage / "same b").unlink()
    os.link(stage / "same a", stage / "same b")


def _point_elsewhere(stage: Path) -> None:
    link = stage / "link"
    info = link.lstat()
    link.unlink()
    link.symlink_to("planted")
    os.chown(link, info.st_uid, info.st_gid, follow_symlinks=False)
    os.utime(link, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)


def _swap(stage: Path) -> None:
    os.rename(stage / "same a", stage / "aside")
    os.rename(stage / "plain", stage / "same a")
    os.rename(stage / "aside", stage / "plain")


def _become(kind: str) -> Callable[[Path], None]:
    def change(stage: Path) -> None:
        (stage / "plain").unlink()
        if kind == "folder":
            (stage / "plain").mkdir()
        else:
            os.mkfifo(stage / "plain")

    return change


_CHANGES: dict[str, Callable[[Path], Any]] = {
    "mode": lambda stage: (stage / "plain").chmod(0o645),
    "setuid": lambda stage: (stage / "plain").chmod(0o4644),
    "group": lambda stage: os.chown(stage / "plain", -1, (stage / "plain").lstat().st_gid + 1),
    "mtime": lambda stage: os.utime(stage / "plain", ns=(0, (stage / "plain").lstat().st_mtime_ns + 1)),
    "remove": lambda stage: (stage / "plain").unlink(),
    "truncate": lambda stage: os.truncate(stage / "plain", 0),
    "to-folder": _become("folder"),
    "to-fifo": _become("fifo"),
    "swap": _swap,
    "target": _point_elsewhere,
    "xattr-changed": lambda stage: os.setxattr(stage / "tagged", "user.drums", b"other"),
    "xattr-added": lambda stage: os.setxattr(stage / "plain", "user.drums", b"new"),
    "xattr-removed": lambda stage: os.removexattr(stage / "tagged", "user.drums"),
    "add-folder": lambda stage: (stage / "another").mkdir(),
    "remove-folder": lambda stage: (stage / "empty").rmdir(),
    "folder-mode": lambda stage: (stage / "empty").chmod(0o701),
    "home-mode": lambda stage: stage.parent.chmod(0o711),
    "copy": _turn_into_copy,
    "hard-link": _turn_into_link,
    "newline-name": lambda stage: _append(stage / "odd\nname"),
    "bytes-name": lambda stage: _append(stage / os.fsdecode(b"odd-\xff")),
    "rename": lambda stage: os.rename(stage / os.fsdecode(b"odd-\xff"), stage / os.fsdecode(b"odd-\xfe")),
    "sparse": lambda stage: _flip(stage / "sparse", 1 << 19),
    "big": lambda stage: _flip(stage / "big", (1 << 18) + 7),
}


def change_stage(target: Target, how: str) -> None:
    """Change one thing of the home's folder `stage`, see `_CHANGES`."""
    _CHANGES[how](target.root / HOME / STAGE)
