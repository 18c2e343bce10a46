"""Gate `isolation`: pid, mount, net, ipc and uts namespaces differ from the host's and every other desktop's."""

from __future__ import annotations

from typing import final

import trio

from drums_core.abc import DesktopView
from drums_core.evidence.processes import is_alive, namespace_inodes, processes_in_pidns
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase, failed, passed
from drums_gates._report import bounded, some

KINDS = ("pid", "mnt", "net", "ipc", "uts")


def _check(view: DesktopView) -> Finding:
    # Whose namespace an inode is; the host's wins over a desktop that shares it.
    owners: dict[str, dict[int, str]] = {kind: {} for kind in KINDS}
    for slot, namespaces in view.others.items():
        for kind in KINDS:
            if kind not in namespaces:
                return failed(f"the {kind} namespace of desktop {slot!r} is not known, so it cannot be told apart")
            owners[kind][namespaces[kind]] = f"desktop {slot!r}"
    host = namespace_inodes("self")
    for kind in KINDS:
        owners[kind][host[kind]] = "the host"

    init = namespace_inodes(view.pid1)
    moved = [f"{k} is {init[k]}, expected {view.namespaces.get(k)}" for k in KINDS if init[k] != view.namespaces.get(k)]
    if moved:
        return failed(f"init is not in the desktop's namespaces: {some(moved, len(moved))}", observed=moved)

    # By namespace and by cgroup: a process that a broken restore left outside the one is seen by the other.
    pids = {view.pid1, *processes_in_pidns(init["pid"])}
    for members in view.cgroup.members().values():
        pids |= members
    faults = []
    for pid in sorted(pids):
        try:
            namespaces = namespace_inodes(pid)
        except (FileNotFoundError, ProcessLookupError):
            if pid == view.pid1 or is_alive(pid):
                raise
            continue
        faults += [
            f"process {pid} shares the {kind} namespace of {owners[kind][namespaces[kind]]}"
            for kind in KINDS
            if namespaces[kind] in owners[kind]
        ]
    return failed(some(faults), observed=bounded(faults)) if faults else passed()


@final
class IsolationGate:
    """Every process of the desktop, not only init."""

    phase = Phase.PRE_RESUME
    records = False

    async def record(self, view: DesktopView) -> Json:
        """Nothing."""
        return None

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether no process shares one of the five namespaces with the host or another desktop."""
        return await trio.to_thread.run_sync(_check, view)


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("isolation", IsolationGate)
