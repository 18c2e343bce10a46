"""Removing what changes meanwhile: a folder that fills again, an entry that somebody else has removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from requires import requires

from drums_core.sys import removal
from drums_core.sys.enter import mount


def make(tmp_path: Path) -> Path:
    """A tree of two files in two folders."""
    top = tmp_path / "top"
    (top / "inner").mkdir(parents=True)
    (top / "file").write_text("1")
    (top / "inner/file").write_text("2")
    return top


@pytest.mark.parametrize(("times", "ends"), [(1, True), (removal._TRIES - 1, True), (removal._TRIES, False)])
def test_a_folder_that_fills_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, ends: bool) -> None:
    """ENOTEMPTY: emptied again, so many times and no more."""
    top, plain, written = make(tmp_path), os.rmdir, [0]

    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        if path == b"inner" and written[0] < times:
            written[0] += 1
            (top / "inner/late").write_text("late")
        plain(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir)
    if ends:
        removal.remove_tree(top)
        assert not top.exists() and written == [times]
    else:
        with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)) as caught:
            removal.remove_tree(top)
        assert caught.value.errno == errno.ENOTEMPTY and (top / "inner/late").exists()


def test_an_entry_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOENT after it was listed, or between two looks at it: another host was faster."""
    top, plain = make(tmp_path), os.unlink
    listed = os.listdir

    def listdir(path: Any) -> Any:
        return [*listed(path), "never-there"]

    def unlink(path: Any, *, dir_fd: int | None = None) -> None:
        plain(path, dir_fd=dir_fd)
        if path == b"file":
            raise FileNotFoundError(errno.ENOENT, "planted")

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(os, "unlink", unlink)
    removal.remove_tree(top)
    assert not top.exists()


@requires("root")
def test_mounts_below_a_folder(tmp_path: Path) -> None:
    """Itself and those below, names with blanks too; none of a folder whose name only begins alike."""
    places = [tmp_path / "root", tmp_path / "root/with blank", tmp_path / "rootless"]
    try:
        for place in places:
            place.mkdir()
            mount("drums-test", str(place), "tmpfs", [])
        assert removal.mounts_below(places[0]) == [str(x) for x in places[:2]]
    finally:
        removal.unmount_below(tmp_path)
    assert removal.mounts_below(tmp_path) == []
