"""Run every probe."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from drums.errors import PrerequisiteError
from drums_core.doctor import host, kernel, storage
from drums_core.doctor.criu import probe_criu_here
from drums_core.doctor.finding import Diagnosis, Finding

Probe = Callable[[Path], Finding]

# Cheap and basic ones first: when one of those fails, it usually explains the later ones.
PROBES: dict[str, Probe] = {
    "kernel": host.kernel_release,
    "python": host.python_version,
    "python_packages": host.python_packages,
    "programs": host.programs,
    "disk": storage.disk_space,
    "state_dir": storage.attributes,
    "user_namespace": kernel.user_namespace,
    "network_namespace": kernel.network_namespace,
    "time_namespace": kernel.time_namespace,
    "overlay": storage.overlay,
    "cgroup": kernel.cgroup_limits,
    "proc_connector": kernel.proc_connector,
    "ptrace": kernel.ptrace,
    "criu": probe_criu_here,
    "inotify": host.inotify_instances,
    "open_files": host.open_files,
}


def require_root() -> None:
    """Refuse to go on as another user than root.

    Raises:
        PrerequisiteError: the caller is not root.
    """
    if (uid := os.geteuid()) != 0:
        raise PrerequisiteError(
            f"drums needs root on the host, for namespaces, mounts and CRIU; this is uid {uid}",
            hint="run the same command with sudo",
            missing="root",
        )


def diagnose(state_dir: Path, progress: Callable[[Finding], None] = lambda finding: None) -> Diagnosis:
    """Run every probe; each is bounded in time and leaves nothing behind.

    Args:
        state_dir: where drums keeps its state; need not exist yet.
        progress: gets each finding as it is made.

    Raises:
        PrerequisiteError: the caller is not root, so that nothing can be tried.
    """
    require_root()
    findings = []
    for name, probe in PROBES.items():
        try:
            finding = probe(state_dir)
        except Exception as error:  # noqa: BLE001 - a probe that breaks is an answer, and the others still count
            observed = f"the probe itself failed: {type(error).__name__}: {error}"
            finding = Finding(name, True, False, observed, "a probe that ends", "report this as a bug of drums")
        findings.append(finding)
        progress(finding)
    return Diagnosis(tuple(findings))
