"""Find the CRIU that this host uses, or install one: the system's if it works, else Debian 13's, else a newer one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs

from drums.errors import PrerequisiteError
from drums_core.criu_provider import prefix as layout
from drums_core.criu_provider.model import RECORD, Criu, Record, Source, read_record, sync_folder
from drums_core.criu_provider.probe import probe_criu
from drums_core.hashing import sha256_of
from drums_core.private_apt import PrivateApt, debian_mirror, signed

OVERRIDE: Final = "DRUMS_CRIU"
# In the order in which they are tried; None stands for what is installed.
_SUITES: dict[Source, str | None] = {"system": None, "debian-13": "trixie", "newer": "sid"}
_PACKAGES = ["criu", "python3-pycriu"]
_CURRENT = "current"
_UNFINISHED = ".new-"


def find_criu(state_dir: Path) -> Criu:
    """The CRIU that was chosen for this host; nothing is downloaded and nothing is tried.

    Args:
        state_dir: where drums keeps its state.

    Raises:
        PrerequisiteError: none was installed, or it changed since.
    """
    if override := os.environ.get(OVERRIDE):
        return _overriding(Path(override), state_dir)
    prefix = _home(state_dir) / _CURRENT
    record = read_record(prefix)
    if record is None:
        raise PrerequisiteError(
            f"no CRIU that works here is installed in {str(_home(state_dir))!r}", hint=_MEND, missing="criu"
        )
    prefix = prefix.resolve()
    binary = prefix / record.binary
    observed = sha256_of(binary) if binary.is_file() else "no file"
    if observed != record.sha256:
        raise PrerequisiteError(
            f"{str(binary)!r} is not the CRIU that was tried here: sha256 {observed}, recorded {record.sha256}",
            hint=_MEND,
            missing="criu",
        )
    return _value(prefix, record)


def install_criu(state_dir: Path, progress: Callable[[str], None] = lambda line: None) -> Criu:
    """Find a CRIU that passes the live probe, and keep it as this host's.

    An interruption at any point leaves the former choice in force and nothing half-usable; the next call sweeps up.

    Args:
        state_dir: where drums keeps its state; made if missing.
        progress: gets a line per step.

    Raises:
        PrerequisiteError: no CRIU works here, with what each one said; or not root.
    """
    if os.geteuid() != 0:
        raise PrerequisiteError("installing CRIU needs root", hint="run it with sudo", missing="root")
    if override := os.environ.get(OVERRIDE):
        chosen = _overriding(Path(override), state_dir)
        result = probe_criu(chosen.path, chosen.pycriu_dir)
        if not result.ok:
            raise PrerequisiteError(
                f"{OVERRIDE}={override!r} (CRIU {chosen.version}) fails a live dump and restore: {result}",
                hint=f"unset {OVERRIDE}, or set it to a CRIU that works here",
                missing="criu",
            )
        progress(f"CRIU {chosen.version} of {OVERRIDE}: {result}")
        return chosen
    home = _home(state_dir)
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home, progress):
        for left in home.glob(f"{_UNFINISHED}*"):
            if left.is_symlink():
                left.unlink()
            else:
                shutil.rmtree(left)
        if kept := _still_good(state_dir, progress):
            return kept
        refused: list[str] = []
        for source in _SUITES:
            with _workshop(home) as workshop:
                try:
                    record = _try(source, workshop, progress)
                except PrerequisiteError as error:
                    refused.append(f"{source}: {error.message}")
                    progress(f"refused: {refused[-1]}")
                else:
                    return _value(_adopt(home, workshop / "prefix", record), record)
    raise PrerequisiteError(
        "no CRIU passes a live dump and restore on this host: " + "; ".join(refused),
        hint=f"set {OVERRIDE} to a CRIU that works here",
        missing="criu",
    )


_MEND = "drums doctor --install-criu"


def _home(state_dir: Path) -> Path:
    return state_dir / "criu"


def _value(prefix: Path, record: Record) -> Criu:
    return Criu(prefix / layout.LAUNCHER, record.version, record.sha256, record.source, prefix / layout.PYCRIU)


def _overriding(launcher: Path, state_dir: Path) -> Criu:
    """The operator's own CRIU, with the message modules that stand nearest to it (the protocol only grows)."""
    launcher = launcher.absolute()
    version = layout.version_of(launcher)
    beside = [launcher.parent / layout.PYCRIU, _home(state_dir) / _CURRENT / layout.PYCRIU]
    messages = next((path.resolve() for path in beside if (path / "rpc_pb2.py").is_file()), None)
    if messages is None and (system := layout.system_pycriu()):
        messages = _home(state_dir) / "system-pycriu"
        if not messages.is_dir():
            messages.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=messages.parent))
            layout.flatten_messages(system, partial / layout.PYCRIU)
            (partial / layout.PYCRIU).rename(messages)
            partial.rmdir()
    if messages is None:
        raise PrerequisiteError(
            f"no message modules for {OVERRIDE}={str(launcher)!r}: looked in {', '.join(str(p) for p in beside)}",
            hint=f"put pycriu's rpc_pb2.py and images/*_pb2.py in a folder {layout.PYCRIU!r} beside it",
            missing="pycriu",
        )
    record = read_record(launcher.parent)
    binary = launcher.parent / record.binary if record else launcher
    return Criu(launcher, version, sha256_of(binary), OVERRIDE, messages)


@contextlib.contextmanager
def _locked(home: Path, progress: Callable[[str], None]) -> Iterator[None]:
    with (home / ".lock").open("w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process installs CRIU; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _workshop(home: Path) -> Iterator[Path]:
    """A folder for one attempt, removed with whatever was not moved out of it."""
    path = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=home))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _still_good(state_dir: Path, progress: Callable[[str], None]) -> Criu | None:
    try:
        kept = find_criu(state_dir)
    except PrerequisiteError:
        return None
    result = probe_criu(kept.path, kept.pycriu_dir)
    progress(f"CRIU {kept.version} ({kept.source}), installed before: {result}")
    if not result.ok:
        return None
    prefix = kept.path.parent
    record = read_record(prefix)
    if record and record.kernel != os.uname().release:
        attrs.evolve(record, kernel=os.uname().release).write(prefix)
    return kept


def _try(source: Source, workshop: Path, progress: Callable[[str], None]) -> Record:
    """Make a prefix of one source in `workshop` and probe it.

    Raises:
        PrerequisiteError: why this source's CRIU is not to be used.
    """
    prefix = workshop / "prefix"
    prefix.mkdir(mode=0o755)
    packages: list[Path] = []
    suite = _SUITES[source]
    if suite is None:
        binary = layout.wrap_system(prefix)
    else:
        progress(f"{source}: fetching CRIU from Debian {suite}")
        (workshop / "apt").mkdir()
        packages = PrivateApt(workshop / "apt", [signed(f"deb {debian_mirror()} {suite} main")]).download(_PACKAGES)
        binary = layout.unpack(packages, prefix)
    launcher = prefix / layout.LAUNCHER
    version = layout.version_of(launcher)
    result = probe_criu(launcher, prefix / layout.PYCRIU)
    if not result.ok:
        raise PrerequisiteError(f"CRIU {version} fails a live dump and restore: {result}")
    progress(f"{source}: CRIU {version} works: {result}")
    names = tuple(package.name for package in packages)
    return Record(version, sha256_of(prefix / binary), source, binary, os.uname().release, names, time.time())


def _adopt(home: Path, prefix: Path, record: Record) -> Path:
    """Move a proven prefix to its place and make it the current one."""
    target = home / record.version
    record.write(prefix)
    if target.exists():
        # Without its record the old one counts for nothing from here on, even if this process dies before the rename.
        (target / RECORD).unlink(missing_ok=True)
        shutil.rmtree(target)
    prefix.rename(target)
    link = home / f"{_UNFINISHED}link"
    link.symlink_to(record.version)
    link.rename(home / _CURRENT)
    sync_folder(home)
    return target
