"""Builds an image's root file system from a recipe.

Everything is fetched by the host: packages by mmdebstrap with the host's own apt configuration, Python distributions by
the host's pip. Nothing of the image runs with a network. A build that fails or is interrupted leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

from drums.errors import ImageBuildError
from drums_core.image.recipe import Recipe
from drums_core.sys.removal import mounts_below
from drums_core.urls import without_credentials

Progress = Callable[[str, float], None]

GUEST_DIR = "opt/drums/guest"
BUILD_DIR = "opt/drums/build"
USER_ID = 1000
GUEST_ID = 900
_DIST_PACKAGES = "usr/local/lib/python3.11/dist-packages"
# Times in the image: one fixed moment, so that two builds of the same packages have the same files.
_EPOCH = "1735689600"
_HOME_FOLDERS = ("Desktop", "Documents", "Downloads", "Music", "Pictures", "Public", "Templates", "Videos")
_EXCLUDED = (
    "/usr/share/doc/*",
    "/usr/share/help/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
    "/usr/share/man/*",
    "/usr/share/locale/*",
)
# Left by the installation, and different in every one.
_VOLATILE = (
    "etc/.pwd.lock",
    "var/cache/apt",
    "var/cache/debconf",
    "var/cache/ldconfig",
    "var/lib/apt/lists",
    "var/lib/dbus/machine-id",
    "var/log",
)
_EMPTIED = ("run", "tmp", "var/tmp", "var/cache/apt", "var/cache/debconf", "var/log")


def build_rootfs(recipe: Recipe, target_dir: Path, *, mirror: str | None, progress: Progress) -> None:
    """Builds the recipe's root file system in `target_dir`; blocks for a minute or more.

    Args:
        recipe: what to build.
        target_dir: must not exist, or be an empty folder; its parent must exist.
        mirror: URI of a Debian mirror; None takes the host's own, from apt's configuration.
        progress: called with a message and a fraction (0..1), at least once a second. It may raise to abandon the
            build; that exception is what the caller gets.

    Raises:
        ImageBuildError: with the last lines of the log.
    """
    if os.geteuid() != 0:
        raise ImageBuildError("an image is built by root only", hint="run it with sudo")
    for tool in ("mmdebstrap", "unshare", "chroot"):
        if shutil.which(tool) is None:
            raise ImageBuildError(f"{tool!r} is not installed", hint=f"apt-get install {_PACKAGE_OF.get(tool, tool)}")
    if target_dir.is_symlink() or (target_dir.exists() and (not target_dir.is_dir() or any(target_dir.iterdir()))):
        raise ImageBuildError(f"{str(target_dir)!r} is not an empty folder")
    sources = debian_sources(recipe.suite, mirror=mirror)
    target_dir.mkdir(exist_ok=True)
    try:
        _install_packages(recipe, target_dir, sources, progress)
        progress("installing Python packages", 0.86)
        _install_python(recipe, target_dir, progress)
        progress("configuring", 0.92)
        _configure(recipe, target_dir)
        progress("compiling", 0.95)
        _compile(recipe, target_dir, progress)
        _run_build_commands(recipe, target_dir, progress)
        _check_applications(recipe, target_dir, progress)
        _clean(target_dir)
        target_dir.chmod(0o755)
    except BaseException:
        remove_rootfs(target_dir)
        raise
    progress("built", 1.0)


_PACKAGE_OF = {"unshare": "util-linux", "chroot": "coreutils"}


# --- where packages come from ---


def debian_sources(suite: str, *, mirror: str | None) -> list[str]:
    """The `deb` lines for a suite, its updates and its security updates.

    With a mirror, that serves the suite and its updates; security updates always come from where the host's apt gets
    them, if it does.

    Raises:
        ImageBuildError: no mirror is given and the host's apt knows none for this suite.
    """
    return sources_from_targets(_index_targets(), suite, mirror=mirror)


def sources_from_targets(targets: str, suite: str, *, mirror: str | None) -> list[str]:
    """As `debian_sources`, from `apt-get indextargets` output: lines of `SITE|RELEASE|COMPONENT|ORIGIN`."""
    sites: dict[str, str] = {}
    for line in targets.splitlines():
        site, release, component, origin = [*line.split("|"), "", "", "", ""][:4]
        if component == "main" and origin == "Debian" and site:
            sites.setdefault(release, site)
    if mirror is not None:
        sites[suite] = sites[f"{suite}-updates"] = mirror.rstrip("/")
    if suite not in sites:
        raise ImageBuildError(
            f"apt on this host has no mirror of Debian {suite!r}", hint="name one with --mirror URL", suite=suite
        )
    pockets = (suite, f"{suite}-updates", f"{suite}-security")
    return [f"deb {sites[pocket]} {pocket} main" for pocket in pockets if pocket in sites]


def _index_targets() -> str:
    """What the host's apt fetches, one line per index; empty on a host without apt."""
    if shutil.which("apt-get") is None:
        return ""
    answer = subprocess.run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(SITE)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)",
            "Created-By: Packages",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout if answer.returncode == 0 else ""


# --- the steps ---


def _install_packages(recipe: Recipe, root: Path, sources: Sequence[str], progress: Progress) -> None:
    command = [
        # In name spaces of its own: what mmdebstrap mounts and starts is gone when it is, however it ends.
        *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *("mmdebstrap", "--verbose", "--mode=root", "--format=directory", "--variant=minbase"),
        '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Languages "none"',
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDED),
        # Without these folders update-alternatives fails on its links to manual pages.
        '--essential-hook=mkdir -p "$1"/usr/share/man/man1 "$1"/usr/share/man/man7',
        f"--include={','.join(recipe.packages)}",
        recipe.suite,
        str(root),
        *sources,
    ]
    meter = _PackageMeter(progress, expected=3 * len(recipe.packages) + 150)
    _run(command, meter.line, lambda: progress(meter.message, meter.fraction))


class _PackageMeter:
    """Turns the output of mmdebstrap, apt and dpkg into progress from 0 to 0.85."""

    def __init__(self, progress: Progress, expected: int) -> None:
        self._progress = progress
        # A guess until apt has told: what comes first is the small essential set.
        self._total = expected
        self._counts = {"Get:": 0, "Unpacking ": 0, "Setting up ": 0}
        self.message = "starting"
        self.fraction = 0.0

    def line(self, text: str) -> None:
        """Takes one line of the log."""
        if found := re.search(r"(\d+) newly installed", text):
            self._total = max(int(found[1]), self._total)
        for prefix, word in (("Get:", "fetching"), ("Unpacking ", "unpacking"), ("Setting up ", "setting up")):
            if not text.startswith(prefix):
                continue
            self._counts[prefix] += 1
            # "Get:7 URI SUITE ARCHITECTURE NAME …", "Unpacking NAME:ARCHITECTURE …", "Setting up NAME:ARCHITECTURE …"
            words = text.removeprefix(prefix).split()
            place = 4 if prefix == "Get:" else 0
            if len(words) > place:
                self.message = f"{word} {words[place].partition(':')[0]}"
            share = sum(min(count / self._total, 1.0) for count in self._counts.values()) / len(self._counts)
            self.fraction = max(self.fraction, round(0.85 * share, 4))
            self._progress(self.message, self.fraction)


def _install_python(recipe: Recipe, root: Path, progress: Progress) -> None:
    target = root / _DIST_PACKAGES
    version = os.readlink(root / "usr/bin/python3").removeprefix("python")
    # Of the image's interpreter, which is not the one that pip runs with (PEP 425).
    machine = ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}"]
    machine += [f"--abi=cp{version.replace('.', '')}", f"--platform=manylinux2014_{os.uname().machine}"]
    for packages, which in ((recipe.pip_packages, []), (recipe.pip_wheels, machine)):
        if packages:
            command = [*_pip(), "install", "--no-deps", "--no-compile", "--disable-pip-version-check", "--no-input"]
            command += ["--root-user-action=ignore", *which, "--target", str(target), *packages]
            _run(command, lambda _: None, lambda: progress("installing Python packages", 0.88))
    # Console scripts would name the host's interpreter; and what pip notes of its own run is no part of an image.
    shutil.rmtree(target / "bin", ignore_errors=True)
    for note in target.glob("*.dist-info/direct_url.json"):
        note.unlink()


def _pip() -> list[str]:
    """How to run pip on this host: with this interpreter, or with the first on PATH that has it."""
    for python in (sys.executable, "python3", "/usr/bin/python3"):
        path = shutil.which(python)
        if path and subprocess.run([path, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
            return [path, "-m", "pip"]
    raise ImageBuildError("no Python on this host has pip", hint="apt-get install python3-pip")


def _configure(recipe: Recipe, root: Path) -> None:
    """Users, names, the recipe's own files and the guest server."""
    _add_account(root, "drums-guest", GUEST_ID, "/nonexistent", "/usr/sbin/nologin")
    _add_account(root, "user", USER_ID, "/home/user", "/bin/bash")
    _write(root, "etc/hostname", "desktop\n")
    _write(root, "etc/hosts", "127.0.0.1 localhost desktop\n::1 localhost ip6-localhost\n")
    _write(root, "etc/machine-id", hashlib.md5(b"drums " + recipe.name.encode()).hexdigest() + "\n")
    _write(root, "etc/apt/sources.list", "# none: a desktop's software is its image's\n")
    # mmdebstrap copies the host's; it would name the host's name servers.
    _write(root, "etc/resolv.conf", "")
    (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink(missing_ok=True)
    files = resources.files("drums_core.image") / "recipes" / recipe.name
    if files.is_dir():
        with resources.as_file(files) as folder:
            _copy_tree(folder, root)
    with resources.as_file(resources.files("drums_core") / "guest") as folder:
        _copy_tree(folder, root / GUEST_DIR)
    home = root / "home/user"
    _make_folder(home)
    skeleton = root / "etc/skel"
    if skeleton.is_dir():
        shutil.copytree(skeleton, home, dirs_exist_ok=True)
    for name in _HOME_FOLDERS:
        _make_folder(home / name)
    for path in [home, *home.rglob("*")]:
        os.chown(path, USER_ID, USER_ID, follow_symlinks=False)


def _add_account(root: Path, name: str, number: int, home: str, shell: str) -> None:
    # Written by hand, as useradd would put the day of the build into the shadow file.
    lines = {
        "passwd": f"{name}:x:{number}:{number}::{home}:{shell}",
        "group": f"{name}:x:{number}:",
        "shadow": f"{name}:!:20000:0:99999:7:::",
        "gshadow": f"{name}:!::",
    }
    for file, line in lines.items():
        path = root / "etc" / file
        text = path.read_text("utf-8")
        # `-` copies are not kept: they would differ by the order of installation.
        path.write_text(text + line + "\n", "utf-8")
        (root / "etc" / f"{file}-").unlink(missing_ok=True)


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    # Never through a link: an absolute one would lead out of the image.
    path.unlink(missing_ok=True)
    _make_folder(path.parent)
    path.write_text(text, "utf-8")
    path.chmod(0o644)


def _make_folder(path: Path) -> None:
    """Makes a folder and its parents with the mode that they have in an image, whatever this process's umask is."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)


def _copy_tree(source: Path, target: Path) -> None:
    """Copies files as root's own; scripts (by their first two bytes) become executable."""
    _make_folder(target)
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if "__pycache__" in path.parts:
            continue
        if path.is_dir():
            _make_folder(copy)
            continue
        content = path.read_bytes()
        copy.unlink(missing_ok=True)
        copy.write_bytes(content)
        copy.chmod(0o755 if content.startswith(b"#!") else 0o644)
        os.utime(copy, (int(_EPOCH), int(_EPOCH)))


def _compile(recipe: Recipe, root: Path, progress: Progress) -> None:
    """Compiles what was copied, and looks for the modules of actions, so that a missing one fails the build."""
    inside = [*_inside(root), "/usr/bin/python3"]
    compiler = [*inside, "-I", "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    folders = [f"/{name}" for name in (GUEST_DIR, _DIST_PACKAGES) if (root / name).is_dir()]
    _run([*compiler, *folders], lambda _: None, lambda: progress("compiling", 0.96))
    # pyautogui asks for a display as it is imported, which there is not; finding the modules is what can be tried.
    names = [package.partition("==")[0] for package in (*recipe.pip_packages, *recipe.pip_wheels)]
    names += ["PIL.Image"] if not names else ["PIL.ImageGrab", "Xlib.display", "tkinter"]
    check = f"import importlib.util as u, sys; sys.exit([n for n in {names!r} if u.find_spec(n) is None] or 0)"
    _run([*inside, "-c", check], lambda _: None, lambda: progress("checking", 0.97))


def _inside(root: Path) -> list[str]:
    """The beginning of a command that runs in the image: without a network, and gone with all that it started."""
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "chroot", str(root)]


def _run_build_commands(recipe: Recipe, root: Path, progress: Progress) -> None:
    for line in recipe.build_commands:
        _run_inside(root, line, f"running {line!r}", progress)
    shutil.rmtree(root / BUILD_DIR, ignore_errors=True)


def _check_applications(recipe: Recipe, root: Path, progress: Progress) -> None:
    """What the recipe promises to tasks is there, or there is no image."""
    look = 'command -v -- "$x" >/dev/null || { echo "$x: no such program in the image" >&2; exit 1; }'
    search = (
        f"PATH=/usr/local/bin:/usr/bin:/bin:/usr/games; for x in {shlex.join(recipe.applications)}; do {look}; done"
    )
    _run_inside(root, search, "looking for the applications", progress)


def _run_inside(root: Path, line: str, message: str, progress: Progress) -> None:
    """Runs a line for a shell in the image."""
    _run([*_inside(root), "/bin/sh", "-ec", line], lambda _: None, lambda: progress(message, 0.98))


def _clean(root: Path) -> None:
    for name in _VOLATILE:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name in _EMPTIED:
        folder = root / name
        shutil.rmtree(folder, ignore_errors=True)
        _make_folder(folder)
        if name.endswith("tmp"):
            folder.chmod(0o1777)
    # The host mounts its own /dev over this one; nodes in it would only be in the way of an unprivileged copy.
    shutil.rmtree(root / "dev")
    _make_folder(root / "dev")
    # Nobody in a desktop becomes somebody else, so no program has the means.
    for tree in ("usr", "opt"):
        for path in (root / tree).rglob("*"):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                path.chmod(stat.S_IMODE(mode) & ~(stat.S_ISUID | stat.S_ISGID))


# --- running commands ---


def _run(command: Sequence[str], on_line: Callable[[str], None], on_idle: Callable[[], None]) -> None:
    """Runs a command to its end, handing over its log line by line.

    `on_idle` is called when a second passed without a line. An exception of either ends the command, with all that it
    started.

    Raises:
        ImageBuildError: it failed; `.log` holds its last lines.
    """
    last: deque[str] = deque(maxlen=40)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(os.environ),
        start_new_session=True,
        # An image's modes are its own, whatever this process's umask is.
        umask=0o022,
    )
    try:
        for text in _lines(process):
            if text is None:
                on_idle()
                continue
            line = without_credentials(text)
            last.append(line)
            on_line(line)
        code = process.wait()
    finally:
        _end(process)
    if code != 0:
        log = "\n".join(last)
        tail = " | ".join(list(last)[-3:])
        shown = [without_credentials(part) for part in command]
        raise ImageBuildError(f"{_name_of(command)!r} ended with {code}: {tail}", log=log, command=shown)


def _name_of(command: Sequence[str]) -> str:
    return next((part for part in command if part in ("mmdebstrap", "pip", "chroot")), command[0])


def _environment(host: Mapping[str, str]) -> dict[str, str]:
    environment = {key: value for key, value in host.items() if not key.startswith(("LC_", "PYTHON"))}
    return environment | {"LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", "SOURCE_DATE_EPOCH": _EPOCH}


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """The process's lines; None whenever a second passes without one."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    rest = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], 1.0)
        if not ready:
            yield None
            continue
        data = os.read(descriptor, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip()
    if rest:
        yield rest.decode("utf-8", "replace").rstrip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Makes sure that the process and its group are gone."""
    if process.poll() is None:
        # SIGTERM reaches mmdebstrap's own clean-up; the name space's end takes whatever is left.
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


# --- removal ---


def remove_rootfs(directory: Path) -> None:
    """Removes a root file system, and never through a mount.

    Raises:
        ImageBuildError: something is still mounted in it; nothing was removed.
    """
    mounts = mounts_below(directory)
    if mounts:
        raise ImageBuildError(
            f"{str(directory)!r} is not removed: {mounts[0]!r} is mounted in it", hint=f"umount {mounts[0]}"
        )
    # rm rather than shutil.rmtree, as only rm can be held to one file system should a mount appear meanwhile.
    removed = subprocess.run(
        ["rm", "-rf", "--one-file-system", "--", str(directory)], capture_output=True, text=True, check=False
    )
    if removed.returncode != 0:
        raise ImageBuildError(f"{str(directory)!r} could not be removed: {removed.stderr.strip()}")
