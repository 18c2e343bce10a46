"""The probe of CRIU: a real dump and restore with the one that this host would use."""

from __future__ import annotations

from pathlib import Path

from drums.errors import PrerequisiteError
from drums_core.criu_provider import find_criu, probe_criu
from drums_core.doctor.finding import Finding

_WANTED = "a CRIU that dumps and restores a small desktop here"
_REMEDY = "drums doctor --install-criu"


def probe_criu_here(state_dir: Path) -> Finding:
    """Try the CRIU that `find_criu` gives."""
    try:
        criu = find_criu(state_dir)
    except PrerequisiteError as error:
        return Finding("criu", True, False, error.message, _WANTED, error.hint or _REMEDY)
    result = probe_criu(criu.path, criu.pycriu_dir)
    observed = f"{criu.version} ({criu.source}): {result}"
    remedy = "unset DRUMS_CRIU, or set it to a CRIU that works here" if criu.source == "DRUMS_CRIU" else _REMEDY
    return Finding("criu", True, result.ok, observed, _WANTED, "" if result.ok else remedy)
