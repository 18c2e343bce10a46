"""`hash_tree` sees every planted difference, and nothing else."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from requires import requires

from drums_core.evidence.files import FIELDS, diff_trees, hash_tree

libc = ctypes.CDLL(None, use_errno=True)


def plant(root: Path) -> Path:
    """A tree with one of each kind of entry."""
    root.mkdir()
    (root / "notes.txt").write_text("hello")
    (root / "big.bin").write_bytes(os.urandom(300_000))
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "sub" / "deep" / "leaf").write_text("leaf")
    (root / "empty").mkdir()
    os.symlink("notes.txt", root / "link")
    os.symlink("/etc/hostname", root / "absolute")
    os.symlink("nowhere", root / "dangling")
    os.link(root / "notes.txt", root / "zz-hard")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(root / "sock"))
    with open(root / "sparse", "wb") as f:
        f.truncate(1 << 25)
    for name in (b"new\nline", b"caf\xe9", b"-rf ' \"", "ünï".encode()):
        with open(os.path.join(os.fsencode(root), name), "wb") as f:
            f.write(name)
    os.setxattr(root / "notes.txt", "user.tag", b"\x00\xff")
    return root


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A tree and its faithful copy."""
    source = plant(tmp_path / "source")
    copy = tmp_path / "copy"
    assert os.system(f"cp -a --reflink=auto '{source}' '{copy}'") == 0
    return source, copy


def differences(pair: tuple[Path, Path]) -> list[str]:
    source, copy = (json.loads(json.dumps(hash_tree(x))) for x in pair)
    return diff_trees(source, copy)


def test_a_faithful_copy_is_equal_and_survives_json(pair: tuple[Path, Path]) -> None:
    """A copy with the same content, owners, modes, times, links and attributes is equal, through JSON too."""
    assert differences(pair) == []
    tree = hash_tree(pair[0])
    assert tree["count"] == len(tree["entries"]) == 18
    assert tree["bytes"] == sum(x[FIELDS.index("size")] or 0 for x in tree["entries"].values())
    assert "new\nline" in tree["entries"] and "caf\udce9" in tree["entries"]
    assert tree["entries"]["absolute"][FIELDS.index("target")] == "/etc/hostname"
    assert tree["entries"]["zz-hard"][FIELDS.index("links")] == "notes.txt"


def _byte(t: Path) -> str:
    status = (t / "big.bin").stat()
    with open(t / "big.bin", "r+b") as f:
        f.seek(200_000)
        byte = f.read(1)
        f.seek(200_000)
        f.write(bytes([byte[0] ^ 1]))
    os.utime(t / "big.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    return "hash"


def _mode(t: Path) -> str:
    (t / "sub" / "deep" / "leaf").chmod(0o600)
    return "mode"


def _folder_mode(t: Path) -> str:
    (t / "empty").chmod(0o700)
    return "mode"


def _root_mode(t: Path) -> str:
    t.chmod(0o711)
    return "mode"


def _mtime(t: Path) -> str:
    os.utime(t / "notes.txt", ns=(0, 1))
    return "mtime_ns"


def _link_mtime(t: Path) -> str:
    os.utime(t / "link", ns=(0, 1), follow_symlinks=False)
    return "mtime_ns"


def _target(t: Path) -> str:
    status = (t / "dangling").lstat()
    (t / "dangling").unlink()
    os.symlink("elsewhere", t / "dangling")
    os.utime(t / "dangling", ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
    return "target"


def _xattr(t: Path) -> str:
    os.setxattr(t / "notes.txt", "user.tag", b"\x00\xfe")
    return "xattrs"


def _xattr_more(t: Path) -> str:
    os.setxattr(t / "empty", "user.more", b"")
    return "xattrs"


def _more(t: Path) -> str:
    (t / "sub" / "extra").touch()
    return "extra"


def _less(t: Path) -> str:
    (t / "sub" / "deep" / "leaf").unlink()
    return "missing"


def _folder_less(t: Path) -> str:
    (t / "empty").rmdir()
    return "missing"


def _odd_less(t: Path) -> str:
    os.unlink(os.path.join(os.fsencode(t), b"caf\xe9"))
    return "missing"


def _unlinked(t: Path) -> str:
    """A hard link turned into a copy: same name, content and times."""
    shutil.copy2(t / "notes.txt", t / "new")
    os.rename(t / "new", t / "zz-hard")
    return "links"


def _kind(t: Path) -> str:
    (t / "pipe").unlink()
    (t / "pipe").touch()
    return "type"


def _sparse(t: Path) -> str:
    status = (t / "sparse").stat()
    with open(t / "sparse", "r+b") as f:
        f.seek(1 << 24)
        f.write(b"x")
    os.utime(t / "sparse", ns=(status.st_atime_ns, status.st_mtime_ns))
    return "hash"


@pytest.mark.parametrize(
    "change",
    [
        _byte,
        _mode,
        _folder_mode,
        _root_mode,
        _mtime,
        _link_mtime,
        _target,
        _xattr,
        _xattr_more,
        _more,
        _less,
        _folder_less,
        _odd_less,
        _unlinked,
        _kind,
        _sparse,
    ],
)
def test_each_planted_difference_is_seen(pair: tuple[Path, Path], change: Callable[[Path], str]) -> None:
    """Any one change of the copy is reported, by what it is."""
    word = change(pair[1])
    found = differences(pair)
    assert found and any(word in x for x in found), found


@requires("root")
def test_owner_is_seen(pair: tuple[Path, Path]) -> None:
    """A change of owner is a difference."""
    os.lchown(pair[1] / "link", 1, 2)
    assert [x for x in differences(pair) if "uid 1, expected 0" in x and "gid 2" in x]


@requires("root")
def test_devices_are_compared_by_number_and_never_opened(pair: tuple[Path, Path]) -> None:
    """Device nodes are compared by their numbers."""
    for tree, minor in zip(pair, (5, 7), strict=True):
        os.mknod(tree / "device", 0o20600, os.makedev(1, minor))
    assert any("device '1:7', expected '1:5'" in x for x in differences(pair))


def test_folder_mtime_is_ignored(pair: tuple[Path, Path]) -> None:
    """CRIU makes and removes files of its own, so a folder's mtime says nothing."""
    os.utime(pair[1] / "sub", ns=(0, 1))
    os.utime(pair[1], ns=(0, 1))
    assert differences(pair) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link to a directory is a link; a path that leads through one, or out of the tree, is refused."""
    (tmp_path / "home").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").touch()
    os.symlink("../secret", tmp_path / "home" / "way")
    assert set(hash_tree(tmp_path / "home")["entries"]) == {".", "way"}
    os.symlink("secret", tmp_path / "fake")
    with pytest.raises(OSError, match="fake"):
        hash_tree(tmp_path, "fake")
    with pytest.raises(ValueError, match="out of the tree"):
        hash_tree(tmp_path / "home", "../secret")


def test_descriptor_and_relative_path(tmp_path: Path) -> None:
    """A root given as a descriptor stays open, and gives the same as a path."""
    plant(tmp_path / "home")
    fd = os.open(tmp_path, os.O_PATH)
    assert hash_tree(fd, "home") == hash_tree(tmp_path, "home") == hash_tree(tmp_path / "home", threads=1)
    os.close(fd)


def test_deep_and_wide_trees_cost_no_descriptors(tmp_path: Path) -> None:
    """Paths beyond PATH_MAX are walked, and nothing is left open."""
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(120):
        name = "d" * 100
        os.mkdir(name, dir_fd=fd)
        deeper = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    before = len(os.listdir("/proc/self/fd"))
    tree = hash_tree(tmp_path)
    assert tree["count"] == 122
    assert max(len(x) for x in tree["entries"]) > 12_000
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def bind_mount(tmp_path: Path) -> Iterator[Path]:
    """A tree with another directory bound into it: same file system, another mount."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    target = os.fsencode(tmp_path / "tree" / "inner")
    assert libc.mount(os.fsencode(tmp_path / "outside"), target, None, ctypes.c_ulong(0x1000), None) == 0
    yield tmp_path / "tree"
    assert libc.umount2(target, 0) == 0


@requires("root")
def test_a_mount_inside_is_not_crossed(bind_mount: Path) -> None:
    """A mount point is reported as such, though its device number is the tree's own."""
    entries: dict[str, Any] = hash_tree(bind_mount)["entries"]
    assert set(entries) == {".", "inner"}
    assert entries["inner"][0] == "mount"
