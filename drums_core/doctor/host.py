"""Probes that only look: kernel and Python versions, programs, modules, limits."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
from pathlib import Path

from drums_core.boot import OPEN_FILES
from drums_core.doctor.finding import Finding

# Id-mapped layers below an overlay came with 5.19; what else the kernel must have, the live probes try.
_KERNEL = (5, 19)
_PYTHON = (3, 11)
_MODULES = ("blake3", "h11", "pluggy", "google.protobuf", "psutil", "pyroute2", "rich", "structlog", "trio")
# program -> Debian package; CRIU starts ip and tar, mmdebstrap builds images, perl runs the probe of CRIU.
_PROGRAMS = {"ip": "iproute2", "mmdebstrap": "mmdebstrap", "perl": "perl-base", "tar": "tar"}
_INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
_INOTIFY_WANTED = 1024


def kernel_release(state_dir: Path) -> Finding:
    """Kernel version and architecture."""
    release, machine = os.uname().release, platform.machine()
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    ok = version >= _KERNEL and machine == "x86_64"
    remedy = "" if ok else "use an x86-64 host with a newer kernel"
    return Finding("kernel", True, ok, f"{release} on {machine}", ">= 5.19 on x86_64", remedy)


def python_version(state_dir: Path) -> Finding:
    """The Python that runs this."""
    ok = sys.version_info[:2] >= _PYTHON
    remedy = "" if ok else "apt-get install python3.11 python3.11-venv"
    return Finding("python", True, ok, platform.python_version(), ">= 3.11", remedy)


def python_packages(state_dir: Path) -> Finding:
    """The modules of the `host` extra."""
    missing = [name for name in _MODULES if not _is_importable(name)]
    observed = f"missing: {', '.join(missing)}" if missing else f"all {len(_MODULES)}"
    remedy = "pip install 'drums[host]'" if missing else ""
    return Finding("python_packages", True, not missing, observed, "the modules of drums[host]", remedy)


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False  # a parent package is missing


def programs(state_dir: Path) -> Finding:
    """The programs that drums and CRIU start."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    observed = f"missing: {', '.join(missing)}" if missing else ", ".join(_PROGRAMS)
    remedy = f"apt-get install {' '.join(_PROGRAMS[name] for name in missing)}" if missing else ""
    return Finding("programs", True, not missing, observed, ", ".join(_PROGRAMS), remedy)


def inotify_instances(state_dir: Path) -> Finding:
    """How many inotify instances all desktops together may have: they are charged to the host's root."""
    observed = int(_INOTIFY.read_text(encoding="ascii"))
    ok = observed >= _INOTIFY_WANTED
    remedy = "" if ok else f"sysctl -w fs.inotify.max_user_instances={_INOTIFY_WANTED}"
    wanted = f">= {_INOTIFY_WANTED} (a desktop takes about 10)"
    return Finding("inotify", False, ok, f"max_user_instances {observed}", wanted, remedy)


def open_files(state_dir: Path) -> Finding:
    """The hard limit of open files: a restore gives a desktop's processes no more than CRIU itself has."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES[1]
    remedy = "" if ok else f"ulimit -Hn {OPEN_FILES[1]}"
    return Finding("open_files", True, ok, f"hard limit {hard}", f">= {OPEN_FILES[1]}", remedy)
