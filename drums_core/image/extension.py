"""Adds what the setting `software` names to an image's root file system.

The packages are fetched before the image is built, by an apt that knows only their source and its key, so that a wrong
key or a source out of reach ends a build at once, and no package of that source takes the place of one of Debian's.
Once the image is built, they are installed in it without a network, with what they depend on, which comes from Debian.
Neither source nor key are in the image.

What is done to a root file system as it is built (`rootfs`) is done again after that, by the same functions. They stay
private there, as that module is an input of every image: with each change of it all hosts build theirs anew.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import attrs

from drums.errors import ImageBuildError
from drums_core.image import rootfs
from drums_core.image.recipe import load_recipe
from drums_core.image.rootfs import BUILD_DIR, USER_ID, Progress
from drums_core.image.software import Software
from drums_core.private_apt import PrivateApt, signed

APPLICATIONS = "applications"
"""The folder with the files of applications that drums knows how to start, by the name of their executable."""
# Maintainer scripts want these. All mounts end with the name space, and so does what the scripts have started.
_INSIDE = """
mount -t proc proc "$0/proc"
mount -t tmpfs -o mode=0755 dev "$0/dev"
for node in null:3 zero:5 full:7 random:8 urandom:9; do mknod -m 0666 "$0/dev/${node%:*}" c 1 "${node#*:}"; done
exec chroot "$0" env PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
"""


def fetch(software: Sequence[Software], target: Path, progress: Progress) -> None:
    """Fetches the named packages of each source, verified by its key, into the empty folder `target`. Blocks.

    Args:
        software: what is wanted.
        target: the caller's, who removes it.
        progress: as of `build_rootfs`.

    Raises:
        ImageBuildError: a source is out of reach, is not signed by its key, or lacks a package.
        PrerequisiteError: this host has no apt.
    """
    for number, one in enumerate(software):
        message = f"fetching {', '.join(one.packages)}"
        progress(message, 0.0)
        folder = target / str(number)
        (folder / "apt").mkdir(parents=True)
        # By `file:` apt would leave the packages where they are.
        apt = PrivateApt(folder / "apt", [re.sub(r"\sfile:", " copy:", one.source)])
        with _told(one):
            _run(apt.update(), message, progress)
            # It writes where it stands.
            download = ["env", f"--chdir={folder}", *apt.command("download", *one.packages)]
            _run(download, message, progress)
        shutil.rmtree(folder / "apt")


def install(software: Sequence[Software], fetched: Path, root: Path, debian: Sequence[str], progress: Progress) -> None:
    """Installs what `fetch` has put into `fetched` in a finished root file system. Blocks.

    Args:
        software: what was fetched; all for one image.
        fetched: the folder.
        root: the root file system.
        debian: Debian's sources, for what the packages depend on.
        progress: as of `build_rootfs`.

    Raises:
        ImageBuildError: a package could not be installed, or brings no executable of that name; `root` is half done.
        PrerequisiteError: this host has no apt, or not Debian's keys.
    """
    own = sorted(fetched.glob("*/*.deb"))
    status = (root / "var/lib/dpkg/status").read_bytes()
    shutil.copytree(root / "etc/apt", fetched / "etc-apt", symlinks=True)
    (fetched / "debian").mkdir()
    apt = PrivateApt(fetched / "debian", [signed(line) for line in debian], status=status)
    work = root / BUILD_DIR
    work.mkdir(parents=True)
    names = ", ".join(package for one in software for package in one.packages)
    with _told(*software):
        _run(apt.update(), "fetching Debian's lists", progress)
        _run(apt.fetch([str(path) for path in own]), f"fetching what {names} needs", progress)
        for path in (*own, *apt.archives.glob("*.deb")):
            shutil.copyfile(path, work / path.name)
        packages = [f"/{BUILD_DIR}/{path.name}" for path in sorted(work.iterdir())]
        command = ["apt-get", "-q", "-y", "-o", "APT::Sandbox::User=root"]
        command += ["-o", "Dpkg::Use-Pty=0", "install", "--no-install-recommends"]
        space = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--net"]
        _run([*space, "/bin/sh", "-ec", _INSIDE, str(root), *command, *packages], f"installing {names}", progress)
        shutil.rmtree(work)
        # A vendor's package may bring its own source and key: apt's configuration is put back as it was.
        shutil.rmtree(root / "etc/apt")
        shutil.copytree(fetched / "etc-apt", root / "etc/apt", symlinks=True)
        for application in [x for one in software for x in one.applications]:
            progress(f"configuring {application}", 0.0)
            _configure(application, software[0].image, root, progress)
    rootfs._clean(root)


def _configure(application: str, image: str, root: Path, progress: Progress) -> None:
    """Lays the files that drums has for an application over the image, runs their script, and looks for the program."""
    files = resources.files("drums_core.image") / APPLICATIONS / application
    if files.is_dir():
        with resources.as_file(files) as folder:
            rootfs._copy_tree(folder, root)
        for path in (root / "home/user").rglob("*"):
            os.chown(path, USER_ID, USER_ID, follow_symlinks=False)
    script = (f"/{BUILD_DIR}/configure.sh",) if (root / BUILD_DIR / "configure.sh").exists() else ()
    recipe = attrs.evolve(load_recipe(image), build_commands=script, applications=(application,))
    rootfs._run_build_commands(recipe, root, progress)
    rootfs._check_applications(recipe, root, progress)


def _run(command: Sequence[str], message: str, progress: Progress) -> None:
    def tell() -> None:
        progress(message, 0.0)

    tell()
    rootfs._run(command, lambda _: None, tell)


@contextmanager
def _told(*software: Software) -> Iterator[None]:
    """Names source, cause and remedy of what fails."""
    sources = " and ".join(repr(one.shown) for one in software)
    try:
        yield
    except ImageBuildError as error:
        log = str(error.facts.get("log", ""))
        cause = _cause(log.splitlines())
        raise ImageBuildError(
            f"the software source {sources} for image {software[0].image!r} cannot be used: {cause}",
            hint=_remedy(cause, software),
            image=software[0].image,
            sources=[one.shown for one in software],
            cause=cause,
            log=log,
        ) from error


def _cause(log: Sequence[str]) -> str:
    """The lines of apt's log that say why it failed."""
    failed = next((i for i, line in enumerate(log) if line.startswith("dpkg: error")), None)
    if failed is not None:  # with the script's own last words before it, and how it ended after it
        said = log[max(failed - 1, 0) : failed + 2]
    else:
        said = [line for line in log if line.startswith(("E: ", "W: ")) or " Depends: " in line] or log
    return "; ".join(line.strip() for line in said[-3:])


def _remedy(cause: str, software: Sequence[Software]) -> str:
    keys = " and ".join(repr(str(one.key)) for one in software)
    if re.search(r"not signed|NO_PUBKEY|GPG error|signature|insecure", cause):
        what = f"put the key that signs this source, as its vendor publishes it, into {keys}"
    elif re.search(r"Unable to locate package|no installation candidate| Depends: ", cause):
        what = "see what `packages` the source has; what they need must be there, too, or in Debian"
    elif "dpkg: error" in cause:
        what = "name a version of the package that installs in this image"
    elif "no such program" in cause:
        what = "name in `applications` the executables that the packages bring"
    else:
        what = "see whether the URL is right and answers from this host (a proxy stands in apt's configuration)"
    return f"{what}; or take the source out of the setting `software`"
