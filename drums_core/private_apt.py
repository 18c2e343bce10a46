"""Download Debian packages with their dependencies, without touching the host's own package state.

apt is pointed at a root of its own: own sources, lists, cache and dpkg status, so that it neither reads nor writes what
the host has installed. With an empty status it resolves every dependency down to libc.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path

from drums.errors import PrerequisiteError
from drums_core.urls import without_credentials

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRROR_VARIABLE = "DRUMS_DEBIAN_MIRROR"
_SOURCES = Path("/etc/apt")
_UPDATE_TIMEOUT_S = 300
# Whatever the host's own configuration allows: what no key has signed is not taken (apt-secure(8)).
_SIGNED_ONLY = tuple(
    f'Acquire::Allow{what} "false";'
    for what in ("InsecureRepositories", "WeakRepositories", "DowngradeToInsecureRepositories")
)


def debian_mirror(sources: Path = _SOURCES) -> str:
    """The URI of the Debian archive that this host is configured to use.

    Args:
        sources: apt's configuration folder.

    Raises:
        PrerequisiteError: no Debian archive is configured.
    """
    if chosen := os.environ.get(MIRROR_VARIABLE):
        return chosen.rstrip("/")
    files = [sources / "sources.list"]
    folder = sources / "sources.list.d"
    if folder.is_dir():
        files += sorted(folder.iterdir())
    for path in files:
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        for uri in _uris(path.read_text(encoding="utf-8", errors="replace")):
            # Security and other vendors' archives have no trixie or sid suite; the archive itself ends in /debian.
            if uri.rstrip("/").endswith("/debian"):
                return uri.rstrip("/")
    raise PrerequisiteError(
        "no Debian archive in apt's configuration, from which a CRIU could be unpacked",
        hint=f"set {MIRROR_VARIABLE} to the URI of a Debian mirror, or DRUMS_CRIU to a CRIU that works here",
        missing="debian mirror",
    )


def _uris(text: str) -> list[str]:
    """URIs of binary archives in a sources file, of either format of sources.list(5), in order."""
    found: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)", line):
            found.append(match.group(1))
        elif match := re.match(r"URIs:\s*(.+)", line, re.IGNORECASE):
            found += match.group(1).split()
    return found


def signed(source: str) -> str:
    """A `deb` line of Debian's own archive, held to Debian's keys.

    Args:
        source: the line, without options.

    Raises:
        PrerequisiteError: this host lacks the keys.
    """
    if not KEYRING.is_file():
        raise PrerequisiteError(
            f"{str(KEYRING)!r} is not there, so Debian's packages cannot be verified",
            hint="apt-get install debian-archive-keyring",
            missing="debian-archive-keyring",
        )
    return source.replace("deb ", f"deb [signed-by={KEYRING}] ", 1)


class PrivateApt:
    """apt with a root of its own. A source that is not signed by the keys that its line names is refused.

    Args:
        root: an empty folder of the caller's, who removes it.
        sources: lines of sources.list(5), each with `signed-by`.
        status: dpkg's record of what counts as installed.

    Raises:
        PrerequisiteError: there is no apt on this host.
    """

    def __init__(self, root: Path, sources: Sequence[str], *, status: bytes = b"") -> None:
        self._sources = " | ".join(sources)
        for name in ("etc/preferences.d", "etc/trusted.gpg.d", "state/lists/partial", "cache/archives/partial", "log"):
            (root / name).mkdir(parents=True)
        (root / "status").write_bytes(status)
        (root / "etc/sources.list").write_text("".join(f"{line}\n" for line in sources), encoding="utf-8")
        # Transport settings (proxies, certificates, date checks) are the host's: its network needs them. Index
        # targets are not: they may ask for files that no drums run reads.
        transport = [
            line
            for line in _run(["apt-config", "dump"], dict(os.environ), 30).splitlines()
            if line.startswith("Acquire::") and not line.startswith(("Acquire::IndexTargets", "Acquire::Changelogs"))
        ]
        own = [
            f'Dir::State "{root}/state/";',
            f'Dir::State::status "{root}/status";',
            f'Dir::Cache "{root}/cache/";',
            f'Dir::Etc "{root}/etc/";',
            # Without this the host's apt.conf.d would add hooks that run programs after an update.
            'Dir::Etc::parts "/dev/null";',
            f'Dir::Log "{root}/log/";',
            # apt's own user cannot enter a private folder.
            'APT::Sandbox::User "root";',
            'Acquire::Languages "none";',
            *_SIGNED_ONLY,
        ]
        (root / "apt.conf").write_text("\n".join(transport + own) + "\n", encoding="utf-8")
        self._own = {"APT_CONFIG": str(root / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
        self.archives = root / "cache/archives"
        """Where `install --download-only` puts packages."""

    def command(self, *arguments: str) -> list[str]:
        """The command line of an `apt-get` with this root."""
        return ["env", *(f"{name}={value}" for name, value in self._own.items()), "apt-get", "-q", "-y", *arguments]

    def update(self) -> list[str]:
        """The command line that fetches the lists; it fails where a source fails."""
        return self.command("update", "--error-on=any")

    def fetch(self, packages: Sequence[str]) -> list[str]:
        """The command line that fetches packages, by name or as files, and all that they depend on."""
        return self.command("install", "--download-only", "--no-install-recommends", *packages)

    def download(self, packages: list[str]) -> list[Path]:
        """Fetch packages and all that they depend on, signatures checked.

        Returns:
            The .deb files.

        Raises:
            PrerequisiteError: the archive cannot be reached, or lacks a package.
        """
        for command in (self.update(), self.fetch(packages)):
            _run(command, dict(os.environ), _UPDATE_TIMEOUT_S, self._sources)
        return sorted(self.archives.glob("*.deb"))


def _run(command: list[str], env: dict[str, str], timeout_s: float, sources: str = "") -> str:
    if shutil.which("apt-get") is None:
        raise PrerequisiteError(
            "apt-get is not on this host, so Debian's packages cannot be fetched",
            hint="drums runs on Debian; where only CRIU is to be had, DRUMS_CRIU may name one that works here",
            missing="apt-get",
        )
    shown = " ".join(dropwhile(lambda word: word == "env" or "=" in word, command))
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise PrerequisiteError(
            f"{shown!r} gave no end within {timeout_s:.0f} s", hint="see whether the Debian mirror answers"
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W:"))] or done.stderr.splitlines()
        raise PrerequisiteError(
            without_credentials(
                f"{shown!r} from {sources!r} failed with exit code {done.returncode}: {'; '.join(lines[-3:])}"
            ),
            hint="see whether the Debian mirror answers",
        )
    return done.stdout
