"""Download a Debian package with its dependencies, without touching the host's own package state.

apt is pointed at a root of its own: own sources, lists, cache and an empty dpkg status, so that it
resolves every dependency down to libc and neither reads nor writes what the host has installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from drums.errors import PrerequisiteError

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRROR_VARIABLE = "DRUMS_DEBIAN_MIRROR"
_SOURCES = Path("/etc/apt")
_UPDATE_TIMEOUT_S = 300


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


class PrivateApt:
    """apt with a root of its own.

    Args:
        root: an empty folder of the caller's, who removes it.
        suite: the Debian suite to draw from, such as "sid".
        mirror: URI of the archive.
    """

    def __init__(self, root: Path, suite: str, mirror: str) -> None:
        self._root = root
        self._suite = suite
        if not KEYRING.is_file():
            raise PrerequisiteError(
                f"{str(KEYRING)!r} is not there, so Debian's packages cannot be verified",
                hint="apt-get install debian-archive-keyring",
                missing="debian-archive-keyring",
            )
        for name in ("etc/preferences.d", "etc/trusted.gpg.d", "state/lists/partial", "cache/archives/partial", "log"):
            (root / name).mkdir(parents=True)
        (root / "status").touch()
        (root / "etc/sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror} {suite} main\n", encoding="utf-8")
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
        ]
        (root / "apt.conf").write_text("\n".join(transport + own) + "\n", encoding="utf-8")
        self._env = dict(os.environ, APT_CONFIG=str(root / "apt.conf"), DEBIAN_FRONTEND="noninteractive", LC_ALL="C")

    def download(self, packages: list[str]) -> list[Path]:
        """Fetch packages and all that they depend on, signatures checked.

        Returns:
            The .deb files.

        Raises:
            PrerequisiteError: the archive cannot be reached, or lacks a package.
        """
        _run(["apt-get", "-q", "-y", "update", "--error-on=any"], self._env, _UPDATE_TIMEOUT_S, self._suite)
        command = ["apt-get", "-q", "-y", "install", "--download-only", "--no-install-recommends", *packages]
        _run(command, self._env, _UPDATE_TIMEOUT_S, self._suite)
        return sorted((self._root / "cache/archives").glob("*.deb"))


def _run(command: list[str], env: dict[str, str], timeout_s: float, suite: str = "") -> str:
    if shutil.which(command[0]) is None:
        raise PrerequisiteError(
            f"{command[0]!r} is not on this host, so Debian's packages cannot be fetched",
            hint="on a host without apt, set DRUMS_CRIU to a CRIU that works here",
            missing=command[0],
        )
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
            f"{' '.join(command)!r} gave no end within {timeout_s:.0f} s", hint="see whether the Debian mirror answers"
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W:"))] or done.stderr.splitlines()
        raise PrerequisiteError(
            f"{' '.join(command)!r} for suite {suite!r} failed with exit code {done.returncode}: "
            + "; ".join(lines[-3:]),
            hint="see whether the Debian mirror answers",
        )
    return done.stdout
