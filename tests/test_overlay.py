"""A desktop's file tree: an overlay whose lower layers are read-only, id-mapped and without a path.

Both ways of mounting it are tried on this kernel. The second is that of kernels before 6.13: called outright, and taken
by itself where fsconfig(2) refuses descriptors as those kernels do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import pytest
import trio
from requires import requires

from drums_core.sys import enter, overlay
from drums_core.sys.overlay import OPTIONS, Layer, mount_overlay
from drums_core.sys.removal import mounts_below, remove_tree, unmount_below
from drums_core.sys.userns import FIRST_ID, open_idmap

pytestmark = requires("root", "userns")

Way = Callable[[Path, Sequence[Layer], Path, Path, int], None]
WAYS = {"descriptors": overlay._mount_by_descriptors, "paths": overlay._mount_by_paths}


@pytest.fixture(scope="module")
def idmap() -> Iterator[int]:
    fd = trio.run(open_idmap)
    yield fd
    os.close(fd)


@attrs.frozen
class Tree:
    """An image with plain ids, a frozen layer with a desktop's ids above it, and the folders of a desktop."""

    top: Path
    idmap: int

    @property
    def target(self) -> Path:
        return self.top / "merged"

    @property
    def image(self) -> Path:
        return self.top / "image"

    @property
    def layers(self) -> list[Layer]:
        return [Layer(self.top / "frozen", shifted=True), Layer(self.image, shifted=False)]

    def mount(self, way: Way, layers: Sequence[Layer] | None = None) -> None:
        way(self.target, self.layers if layers is None else layers, self.top / "upper", self.top / "work", self.idmap)

    def names(self) -> set[str]:
        return set(os.listdir(self.top))


FOLDERS = ("image", "frozen", "upper", "work", "merged")


def make_tree(top: Path, idmap: int) -> Tree:
    for name in FOLDERS:
        (top / name).mkdir(parents=True)
        if name not in ("image", "merged"):
            os.chown(top / name, FIRST_ID, FIRST_ID)
    for name, text in (("both", "image"), ("below", "image"), ("deleted", "image")):
        (top / "image" / name).write_text(text)
    (top / "image" / "etc").mkdir()
    (top / "image" / "etc" / "shadow").write_text("image")
    os.chown(top / "image" / "below", 1000, 1000)
    (top / "frozen" / "both").write_text("frozen")
    os.chown(top / "frozen" / "both", FIRST_ID + 1000, FIRST_ID + 1000)
    return Tree(top, idmap)


@pytest.fixture
def tree(tmp_path: Path, idmap: int) -> Iterator[Tree]:
    made = make_tree(tmp_path / "t", idmap)
    yield made
    unmount_below(made.top)
    remove_tree(made.top)


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def options_of(place: Path) -> set[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4] == str(place):
            return {before.split()[5], *after.split()[2].split(",")}
    raise LookupError(place)


def mount_count() -> int:
    return len(Path("/proc/self/mountinfo").read_text().splitlines())


def test_layers_in_order_with_the_desktops_ids(tree: Tree, way: Way) -> None:
    """Topmost first; the image's root is the desktop's root, and a shifted layer's owners stay as they are."""
    tree.mount(way)
    assert (tree.target / "both").read_text() == "frozen"
    assert (tree.target / "below").read_text() == "image"
    owners = {name: (tree.target / name).stat().st_uid for name in ("both", "below", "deleted")}
    assert owners == {"both": FIRST_ID + 1000, "below": FIRST_ID + 1000, "deleted": FIRST_ID}


def test_options_are_in_force(tree: Tree, way: Way) -> None:
    """The kernel shows each option that was asked for: it turns some off in silence where it cannot do them."""
    tree.mount(way)
    assert {f"{key}={value}" for key, value in OPTIONS.items()} <= options_of(tree.target)


def test_no_path_leads_into_a_layer(tree: Tree, way: Way) -> None:
    """Once it is mounted, the target is the only mount below the folder, and no folder is new."""
    before = tree.names(), mount_count()
    tree.mount(way)
    assert mounts_below(tree.top) == [str(tree.target)]
    assert (tree.names(), mount_count()) == (before[0], before[1] + 1)
    assert not [fd for fd in os.listdir("/proc/self/fd") if _points_into(fd, tree.top)]


def _points_into(fd: str, top: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(top))
    except FileNotFoundError:
        return False  # the listing's own


def test_writes_go_to_the_upper_layer(tree: Tree, way: Way) -> None:
    """Changing, adding and removing leave the layers as they were."""
    tree.mount(way)
    (tree.target / "both").write_text("new")
    (tree.target / "added").write_text("new")
    (tree.target / "deleted").unlink()
    assert (tree.image / "both").read_text() == "image"
    assert (tree.top / "frozen" / "both").read_text() == "frozen"
    assert (tree.image / "deleted").exists() and not (tree.target / "deleted").exists()
    assert (tree.top / "upper" / "both").read_text() == "new"


def test_a_removal_through_the_mount_cannot_reach_the_image(tree: Tree, way: Way) -> None:
    """Even rmtree of the mounted tree and of its folders beside it; and drums' own refuses while it is mounted."""
    tree.mount(way)
    with pytest.raises(OSError, match="mounted below it"):
        remove_tree(tree.top)
    for name in os.listdir(tree.target):
        path = tree.target / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert os.listdir(tree.target) == []
    assert (tree.image / "etc" / "shadow").read_text() == "image"
    assert (tree.top / "frozen" / "both").read_text() == "frozen"


def test_a_clone_is_read_only(tree: Tree) -> None:
    """What the overlay is given refuses to be written even by root."""
    fd = overlay.clone_tree(tree.image, tree.idmap)
    try:
        for attempt in (
            lambda: os.open("below", os.O_WRONLY, dir_fd=fd),
            lambda: os.unlink("below", dir_fd=fd),
            lambda: os.mkdir("new", dir_fd=fd),
        ):
            with pytest.raises(OSError) as caught:
                attempt()
            assert caught.value.errno == errno.EROFS
        assert os.stat("below", dir_fd=fd).st_uid == FIRST_ID + 1000
    finally:
        os.close(fd)


def handle_of(path: Path) -> bytes:
    buffer = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 8 + 128)
    mount_id = ctypes.c_int()
    enter.checked(
        enter.libc.name_to_handle_at(-100, os.fsencode(path), buffer, ctypes.byref(mount_id), 0), f"handle of {path}"
    )
    return buffer.raw


def read_by_handle(handle: bytes, mount: Path) -> str:
    mount_fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with open(enter.checked(enter.libc.open_by_handle_at(mount_fd, handle, os.O_RDONLY), "by handle")) as f:
            return f.read()
    finally:
        os.close(mount_fd)


def test_file_handles_open(tree: Tree, way: Way) -> None:
    """CRIU keeps inotify watches as file handles: of files of either layer, of a copied-up one, after a remount too."""
    tree.mount(way)
    (tree.target / "added").write_text("added")
    handles = {name: handle_of(tree.target / name) for name in ("both", "below", "added")}
    (tree.target / "below").write_text("copied up")
    for _ in range(2):
        texts = {name: read_by_handle(handle, tree.target) for name, handle in handles.items()}
        assert texts == {"both": "frozen", "below": "copied up", "added": "added"}
        unmount_below(tree.top)
        Path("/proc/sys/vm/drop_caches").write_text("2")
        tree.mount(way)


@pytest.mark.parametrize("fault", ["layer", "upper", "work"])
def test_a_failed_mount_leaves_nothing(tree: Tree, way: Way, fault: str) -> None:
    """A layer, an upper or a work folder that is not there: an OSError, no mount, no folder, no descriptor."""
    before = tree.names(), mount_count(), len(os.listdir("/proc/self/fd"))
    layers = tree.layers
    paths = {"upper": tree.top / "upper", "work": tree.top / "work"}
    if fault == "layer":
        layers.append(Layer(tree.top / "absent", shifted=False))
    else:
        paths[fault] = tree.top / "absent"
    with pytest.raises(FileNotFoundError):
        way(tree.target, layers, paths["upper"], paths["work"], tree.idmap)
    assert (tree.names(), mount_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_path_that_cannot_be_taken_away_undoes_the_mount(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer's path cannot be detached, the overlay does not stay either, and rmdir deletes nothing in it."""
    real = overlay._detach
    refused: list[Path] = []

    def detach(place: Path) -> None:
        if place.parent != tree.top and not refused:
            refused.append(place)
            raise OSError(errno.EBUSY, "planted")
        real(place)

    monkeypatch.setattr(overlay, "_detach", detach)
    with pytest.raises(OSError) as caught:
        tree.mount(overlay._mount_by_paths)
    assert caught.value.args == (errno.EBUSY, "planted")
    assert mounts_below(tree.top) == [str(refused[0])]  # the planted one alone
    assert (tree.image / "etc" / "shadow").read_text() == "image"


def test_interrupted_in_the_middle(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of any kind between two layers undoes those before."""
    before = tree.names(), mount_count()
    real = overlay.attach_tree

    def attach(fd: int, place: Path) -> None:
        if place.name == "1":
            raise KeyboardInterrupt
        real(fd, place)

    monkeypatch.setattr(overlay, "attach_tree", attach)
    with pytest.raises(KeyboardInterrupt):
        tree.mount(overlay._mount_by_paths)
    assert (tree.names(), mount_count()) == before


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_the_second_way_is_taken_where_the_first_is_refused(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Kernels from 6.5 refuse a descriptor with EINVAL, older ones with EOPNOTSUPP."""
    taken = []

    def paths(*arguments: object) -> None:
        taken.append("paths")
        WAYS["paths"](*arguments)  # type: ignore[arg-type]

    class OldKernel:
        """This kernel, but that fsconfig takes no descriptor."""

        def __getattr__(self, name: str) -> object:
            return getattr(enter.libc, name)

        def syscall(self, call: int, *arguments: object) -> int:
            if call == overlay._FSCONFIG and arguments[1] == overlay._SET_FD:
                ctypes.set_errno(number)
                return -1
            return int(enter.libc.syscall(call, *arguments))

    monkeypatch.setattr(overlay, "libc", OldKernel())
    monkeypatch.setattr(overlay, "_mount_by_paths", paths)
    tree.mount(mount_overlay)
    assert taken == ["paths"]
    assert (tree.target / "both").read_text() == "frozen"


def test_the_first_way_is_taken_here(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel takes descriptors, no path is made even for a moment."""
    release = tuple(int(x) for x in os.uname().release.split("-")[0].split(".")[:2])
    if release < (6, 13):
        pytest.skip(f"Linux {os.uname().release} takes no layer by descriptor")
    monkeypatch.setattr(overlay, "_mount_by_paths", None)
    tree.mount(mount_overlay)


def test_a_refusal_that_both_ways_share(tree: Tree) -> None:
    """A layer that is no folder: the second way's error, with the first's as a note."""
    with pytest.raises(OSError) as caught:
        tree.mount(mount_overlay, [Layer(tree.image / "below", shifted=False), *tree.layers])
    assert caught.value.errno in (errno.EINVAL, errno.ENOTDIR)
    assert mounts_below(tree.top) == [] and tree.names() == set(FOLDERS)


@pytest.mark.parametrize("name", ["a:b", "a,b", "a\\b", "a,b:c\\,d\\:e\\\\", "sp ace", "é"])
def test_odd_paths(tmp_path: Path, idmap: int, way: Way, name: str) -> None:
    """What separates overlayfs's options and layers, and what escapes it, is an ordinary character of a path."""
    made = make_tree(tmp_path / name, idmap)
    try:
        made.mount(way)
        (made.target / "both").write_text("new")
        assert (made.top / "upper" / "both").read_text() == "new"
        assert (made.target / "below").read_text() == "image"
    finally:
        unmount_below(made.top)
        remove_tree(made.top)


def test_long_paths(tmp_path: Path, idmap: int, way: Way) -> None:
    """More than the 255 bytes that fsconfig takes as a string."""
    made = make_tree(tmp_path / ("x" * 200) / ("y" * 200), idmap)
    try:
        made.mount(way)
        assert (made.target / "both").read_text() == "frozen"
    finally:
        unmount_below(made.top)
        remove_tree(made.top)


def test_too_many_layers_for_the_page_of_options(tree: Tree) -> None:
    """The error says observed against allowed and how to mend it, and nothing is left."""
    before = tree.names(), mount_count()
    with pytest.raises(OSError, match=r"400 layers needs \d{5} bytes of options, this kernel takes 4095: use fewer"):
        tree.mount(overlay._mount_by_paths, [Layer(tree.image, shifted=False)] * 400)
    assert (tree.names(), mount_count()) == before
    assert len(os.fsencode(overlay._options([Path("/x")] * 10, Path("/u"), Path("/w")))) < 4095
