"""Which CRIU a host uses: the value that the rest of drums reads, and its record on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal, cast

import attrs

Source = Literal["system", "debian-13", "newer", "DRUMS_CRIU"]

RECORD = "criu.json"
# Lines that every dump or restore has: CRIU tries to raise its own limits, loads empty iptables rules with programs
# that need not be there, and sets addresses that the kernel has set already.
HARMLESS = ("RLIMIT_NOFILE", "tables", "already assigned")


@attrs.frozen
class Criu:
    """One usable CRIU.

    Args:
        path: an executable that is started as `path swrk FD`.
        version: CRIU's own version, such as "4.2.1".
        sha256: hash of the CRIU binary behind `path`, so that a checkpoint can name what made it.
        source: where it came from.
        pycriu_dir: a folder that holds `rpc_pb2.py`, `stats_pb2.py` and the images' other message
            modules side by side, for `sys.path`.
    """

    path: Path
    version: str
    sha256: str
    source: Source
    pycriu_dir: Path


@attrs.frozen
class Record:
    """What `criu.json` in a prefix says; written last, so that its presence means a whole prefix.

    Args:
        version: CRIU's version.
        sha256: hash of `binary` when it was accepted.
        source: where the binary came from.
        binary: the ELF file behind the launcher; absolute, or relative to the prefix.
        kernel: the kernel release on which the live probe passed.
        packages: what was unpacked, as file names; empty for the system's CRIU.
        when: seconds since the epoch.
    """

    version: str
    sha256: str
    source: Source
    binary: str
    kernel: str
    packages: tuple[str, ...]
    when: float

    def write(self, prefix: Path) -> None:
        """Write the record into `prefix` and make it and its folder durable."""
        partial = prefix / f".{RECORD}"
        with partial.open("w", encoding="utf-8") as file:
            json.dump(attrs.asdict(self), file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(prefix / RECORD)
        sync_folder(prefix)


def read_record(prefix: Path) -> Record | None:
    """The record of a prefix, or None when there is no whole one."""
    try:
        data = json.loads((prefix / RECORD).read_text(encoding="utf-8"))
        return Record(
            version=str(data["version"]),
            sha256=str(data["sha256"]),
            source=cast(Source, data["source"]),
            binary=str(data["binary"]),
            kernel=str(data["kernel"]),
            packages=tuple(str(name) for name in data["packages"]),
            when=float(data["when"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
