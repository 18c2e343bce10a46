"""Lay out a CRIU in a folder of its own: launcher, libraries, message modules.

A prefix is `<state_dir>/criu/<version>/` with `criu` (the launcher), `pycriu/` (message modules, flat),
`root/` (the unpacked packages; absent for the system's CRIU) and, once whole, `criu.json`.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

from drums.errors import PrerequisiteError

LAUNCHER = "criu"
PYCRIU = "pycriu"
_BINARY = "root/usr/sbin/criu"
_SYSTEM_BINARIES = (Path("/usr/sbin/criu"), Path("/usr/local/sbin/criu"), Path("/usr/bin/criu"))
_SYSTEM_PYCRIU = (Path("/usr/lib/python3/dist-packages/pycriu"), Path("/usr/local/lib/python3/dist-packages/pycriu"))

# Its libraries come from the prefix, but the programs that it starts (ip, tar) are the host's: --library-path, unlike
# LD_LIBRARY_PATH, is not inherited by them.
_PRIVATE_LAUNCHER = """\
#!/bin/sh
prefix=${{0%/*}}/root
exec "$prefix/{loader}" --library-path "{library_path}" "$prefix/usr/sbin/criu" "$@"
"""


def unpack(packages: list[Path], prefix: Path) -> str:
    """Unpack downloaded packages into an empty prefix and write its launcher.

    Returns:
        The CRIU binary, relative to the prefix.

    Raises:
        PrerequisiteError: a package does not hold what it must.
    """
    root = prefix / "root"
    root.mkdir()
    messages = prefix / ".messages"
    for package in packages:
        name = package.name.partition("_")[0]
        if name in ("python3-pycriu", "python3-criu"):
            _extract(package, messages)
        elif not name.startswith(("python3", "libpython")):
            _extract(package, root)
    for name in ("doc", "man", "locale", "lintian", "bash-completion"):
        shutil.rmtree(root / "usr/share" / name, ignore_errors=True)
    loader = next(
        iter(sorted(root.glob("usr/lib/*/ld-linux-*.so.*")) + sorted(root.glob("lib/*/ld-linux-*.so.*"))), None
    )
    binary = prefix / _BINARY
    pycriu = next(iter(sorted(messages.glob("usr/lib/python3*/dist-packages/pycriu"))), None)
    if loader is None or not binary.is_file() or pycriu is None:
        raise PrerequisiteError(
            f"the downloaded packages are not a whole CRIU: loader {loader is not None}, "
            f"binary {binary.is_file()}, pycriu {pycriu is not None}",
            hint="set DRUMS_CRIU to a CRIU that works here",
        )
    folders = [f"$prefix/{folder.relative_to(root)}" for folder in (loader.parent, root / "usr/lib")]
    text = _PRIVATE_LAUNCHER.format(loader=loader.relative_to(root), library_path=":".join(folders))
    _write_launcher(prefix, text)
    flatten_messages(pycriu, prefix / PYCRIU)
    shutil.rmtree(messages)
    return _BINARY


def wrap_system(prefix: Path) -> str:
    """Make an empty prefix stand for the system's CRIU.

    Returns:
        The system's binary.

    Raises:
        PrerequisiteError: CRIU or its message modules are not installed.
    """
    binary = next((path for path in _SYSTEM_BINARIES if path.is_file()), None)
    pycriu = system_pycriu()
    if binary is None or pycriu is None:
        missing = [name for name, found in (("criu", binary), ("python3-pycriu", pycriu)) if found is None]
        raise PrerequisiteError(f"not installed: {', '.join(missing)}")
    _write_launcher(prefix, f'#!/bin/sh\nexec {shlex.quote(str(binary))} "$@"\n')
    flatten_messages(pycriu, prefix / PYCRIU)
    return str(binary)


def system_pycriu() -> Path | None:
    """The system's pycriu package, if it holds the RPC's messages."""
    return next((path for path in _SYSTEM_PYCRIU if (path / "rpc_pb2.py").is_file()), None)


def flatten_messages(pycriu: Path, target: Path) -> None:
    """Copy every generated message module into one folder.

    The modules import each other by bare name, so one folder on sys.path serves them all; pycriu's own
    `images` package would have to be imported, with its many side effects, to reach `stats_pb2`.
    """
    target.mkdir()
    for module in (*pycriu.glob("*_pb2.py"), *(pycriu / "images").glob("*_pb2.py")):
        shutil.copyfile(module, target / module.name)


def version_of(launcher: Path) -> str:
    """The version that a CRIU says it has.

    Raises:
        PrerequisiteError: it does not start, or does not answer like CRIU.
    """
    try:
        done = subprocess.run(
            [launcher, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrerequisiteError(f"{str(launcher)!r} does not start: {error}", hint=_NOT_CRIU) from error
    for line in done.stdout.splitlines():
        if line.startswith("Version:") and done.returncode == 0:
            return line.partition(":")[2].strip()
    said = (done.stderr or done.stdout).strip()[-200:]
    raise PrerequisiteError(
        f"{str(launcher)!r} is no CRIU: --version gave exit code {done.returncode} and {said!r}", hint=_NOT_CRIU
    )


_NOT_CRIU = "unset DRUMS_CRIU, or set it to a CRIU that works here"


def _write_launcher(prefix: Path, text: str) -> None:
    launcher = prefix / LAUNCHER
    launcher.write_text(text, encoding="utf-8")
    launcher.chmod(0o755)


def _extract(package: Path, target: Path) -> None:
    done = subprocess.run(
        ["dpkg-deb", "-x", package, target], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise PrerequisiteError(
            f"{package.name!r} cannot be unpacked: {done.stderr.strip()[-300:]}", hint="see whether the disk is full"
        )
