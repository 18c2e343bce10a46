"""Recipes, where packages come from, the digest, and builds that end early."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import drums_core
from drums.errors import ConfigError, ImageBuildError, ImageNotFound
from drums_core.image import rootfs
from drums_core.image.recipe import known_recipes, load_recipe, parse_recipe
from drums_core.image.store import inputs_digest
from drums_core.image.tree_digest import digest_rootfs

TARGETS = """\
http://one.example/debian|bookworm|main|Debian
http://one.example/debian|bookworm|contrib|Debian
http://two.example/debian|bookworm-updates|main|Debian
http://sec.example/debian-security|bookworm-security|main|Debian
http://other.example|nodistro|main|Other
http://late.example/debian|bookworm|main|Debian
"""


# --- recipes ---


def test_every_recipe_loads() -> None:
    assert "minimal" in known_recipes()
    for name in known_recipes():
        recipe = load_recipe(name)
        assert recipe.name == name
        assert len(set(recipe.packages)) == len(recipe.packages)
        assert all("==" in package for package in recipe.pip_packages)
    assert "python" in load_recipe("minimal").applications


def test_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(ImageNotFound) as caught:
        load_recipe("maximal")
    assert caught.value.image == "maximal"
    assert caught.value.known == list(known_recipes())
    assert "minimal" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("name = ", "$"),
        ('name = "x"\ndescription = ""\nsuite = 7\npackages = []', "$.suite"),
        ('name = "x"\ndescription = ""\nsuite = "s"\npackages = [1]', "$.packages[0]"),
        ('name = "y"\ndescription = ""\nsuite = "s"\npackages = []', "$.name"),
        ('name = "x"\ndescription = ""\nsuite = "s"\npackages = []\nmore = 1', "$"),
        ('name = "x"', "$.description"),
    ],
)
def test_malformed_recipe_is_refused_with_its_path(text: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(text, "x")
    assert caught.value.path == path


# --- where packages come from ---


def test_sources_are_the_hosts() -> None:
    assert rootfs.sources_from_targets(TARGETS, "bookworm", mirror=None) == [
        "deb http://one.example/debian bookworm main",
        "deb http://two.example/debian bookworm-updates main",
        "deb http://sec.example/debian-security bookworm-security main",
    ]


def test_mirror_replaces_all_but_security() -> None:
    assert rootfs.sources_from_targets(TARGETS, "bookworm", mirror="http://m.example/debian/") == [
        "deb http://m.example/debian bookworm main",
        "deb http://m.example/debian bookworm-updates main",
        "deb http://sec.example/debian-security bookworm-security main",
    ]
    assert len(rootfs.sources_from_targets("", "bookworm", mirror="http://m.example/debian")) == 2


@pytest.mark.parametrize("targets", ["", "junk", TARGETS.replace("|Debian", "|Ubuntu")])
def test_host_without_debian_needs_a_mirror(targets: str) -> None:
    with pytest.raises(ImageBuildError) as caught:
        rootfs.sources_from_targets(targets, "bookworm", mirror=None)
    assert "--mirror" in caught.value.hint


def test_credentials_of_a_mirror_are_in_no_message() -> None:
    """Neither in the log of a build nor in what the error says, nor in its command."""
    line = "deb http://me:p@ss:w0rd@m.example/debian bookworm main"
    told: list[str] = []
    script = f"print('E: cannot fetch ' + {line!r}); raise SystemExit(3)"
    with pytest.raises(ImageBuildError) as caught:
        rootfs._run([sys.executable, "-c", script, line], told.append, lambda: None)
    assert told == ["E: cannot fetch deb http://m.example/debian bookworm main"]
    assert "m.example" in str(caught.value) and "m.example" in caught.value.command[-1]
    for shown in (str(caught.value), *map(str, caught.value.facts.values())):
        assert "p@" not in shown and "w0rd" not in shown


# --- progress ---


def test_progress_grows_and_names_packages() -> None:
    told: list[tuple[str, float]] = []
    meter = rootfs._PackageMeter(lambda message, fraction: told.append((message, fraction)), expected=2)
    log = ["0 upgraded, 2 newly installed", "Get:1 http://m.example suite/main amd64 bash amd64 5.2 [1 kB]", "noise"]
    log += [
        "Get:2 http://m.example suite/main all zip all 3",
        "Unpacking bash:amd64 (5.2) ...",
        "Unpacking zip (3) ...",
    ]
    for line in [*log, "Setting up bash:amd64 (5.2) ...", "Setting up zip (3) ..."]:
        meter.line(line)
    assert [message for message, _ in told][:3] == ["fetching bash", "fetching zip", "unpacking bash"]
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert (fractions[-1], meter.message) == (0.85, "setting up zip")


# --- the digest ---


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "a/b").mkdir(parents=True)
    (root / "a/file").write_bytes(b"content")
    (root / "a/file").chmod(0o644)
    (root / "a/link").symlink_to("file")
    os.mkfifo(root / "pipe")
    return root


def test_digest_does_not_depend_on_times_or_place(tree: Path, tmp_path: Path) -> None:
    before = digest_rootfs(tree)
    os.utime(tree / "a/file", (1, 1))
    moved = tree.rename(tmp_path / "elsewhere")
    assert digest_rootfs(moved) == before


def test_digest_tells_every_change(tree: Path) -> None:
    seen = {digest_rootfs(tree)}
    (tree / "a/file").write_bytes(b"contenu")
    seen.add(digest_rootfs(tree))
    (tree / "a/file").chmod(0o755)
    seen.add(digest_rootfs(tree))
    (tree / "a/link").unlink()
    (tree / "a/link").symlink_to("elif")
    seen.add(digest_rootfs(tree))
    (tree / "a/b").rename(tree / "a/c")
    seen.add(digest_rootfs(tree))
    tree.chmod(0o700)
    seen.add(digest_rootfs(tree))
    assert len(seen) == 6


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_digest_tells_owners(tree: Path) -> None:
    before = digest_rootfs(tree)
    os.chown(tree / "a/file", 1000, 0)
    owner = digest_rootfs(tree)
    os.chown(tree / "a/file", 0, 1000)
    assert len({before, owner, digest_rootfs(tree)}) == 3


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ("guest/server.py", True),
        ("image/recipes/minimal.toml", True),
        ("image/recipes/osworld.toml", False),
        ("image/rootfs.py", True),
        ("image/tree_digest.py", True),
    ],
)
def test_what_an_image_is_built_from(
    changed: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is built anew when what makes its files or its digest has changed."""
    for part in ("guest", "image"):
        shutil.copytree(Path(drums_core.__file__).with_name(part), tmp_path / part)
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    before = inputs_digest("minimal")
    with open(tmp_path / changed, "a") as file:
        file.write("#")
    assert (inputs_digest("minimal") != before) is counts


# --- builds that end early ---


def test_nothing_is_removed_through_a_mount(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootfs, "mounts_below", lambda directory: [f"{directory}/a"])
    with pytest.raises(ImageBuildError, match="mounted"):
        rootfs.remove_rootfs(tree)
    assert (tree / "a/file").exists()


@pytest.fixture
def fake_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A build whose mmdebstrap is a script of the test's; returns where it is built."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(rootfs, "_index_targets", lambda: TARGETS)
    return tmp_path / "image"


def replace_commands(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    original = rootfs._run

    def run(command: list[str], on_line: object, on_idle: object) -> None:
        target = next(part for part in command if part.endswith("/image"))
        original([sys.executable, "-c", script, target], on_line, on_idle)  # type: ignore[arg-type]

    monkeypatch.setattr(rootfs, "_run", run)


def test_failed_build_leaves_nothing_and_quotes_the_log(fake_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'x').mkdir(); print('E: no such package'); sys.exit(25)"
    replace_commands(monkeypatch, script)
    with pytest.raises(ImageBuildError, match="no such package") as caught:
        rootfs.build_rootfs(load_recipe("minimal"), fake_build, mirror=None, progress=lambda message, fraction: None)
    assert "E: no such package" in caught.value.log
    assert not fake_build.exists()


def test_interrupted_build_leaves_nothing(fake_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import pathlib, subprocess, sys, time\n"
        "root = pathlib.Path(sys.argv[1]); (root / 'x').mkdir()\n"
        "child = subprocess.Popen(['sleep', '600']); (root.parent / 'pid').write_text(str(child.pid))\n"
        "print('Setting up bash (5) ...', flush=True); time.sleep(600)\n"
    )
    replace_commands(monkeypatch, script)

    def progress(message: str, fraction: float) -> None:
        if message.startswith("setting up"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rootfs.build_rootfs(load_recipe("minimal"), fake_build, mirror=None, progress=progress)
    assert not fake_build.exists()
    # What the command had started ends with it; a zombie, where nobody reaps, counts as ended.
    pid = (fake_build.parent / "pid").read_text()
    state = subprocess.run(
        ["ps", "-o", "state=", "-p", pid], capture_output=True, text=True, check=False
    ).stdout.strip()
    assert state in ("", "Z")


def test_folder_that_holds_something_is_refused_and_kept(fake_build: Path) -> None:
    fake_build.mkdir()
    (fake_build / "mine").touch()
    with pytest.raises(ImageBuildError, match="not an empty folder"):
        rootfs.build_rootfs(load_recipe("minimal"), fake_build, mirror=None, progress=lambda message, fraction: None)
    assert (fake_build / "mine").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="about everybody but root")
def test_only_root_builds(tmp_path: Path) -> None:
    with pytest.raises(ImageBuildError, match="root"):
        rootfs.build_rootfs(load_recipe("minimal"), tmp_path / "image", mirror=None, progress=lambda m, f: None)
