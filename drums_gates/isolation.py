"""Gate `isolation`: no process shares a namespace with the host or another desktop, or has one that it had not.

The kinds are pid, mount, net, ipc, uts, and user: whoever is in the host's user namespace is root of the host.
"""

from __future__ import annotations

from typing import final

import trio

from drums_core.abc import DesktopView
from drums_core.evidence.processes import is_alive, namespace_inodes, processes_in_pidns, read_nspid
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase, failed, passed
from drums_gates._report import bounded, no_evidence, some

KINDS = ("pid", "mnt", "net", "ipc", "uts", "user")


def _apart(view: DesktopView) -> dict[str, Json]:
    """Pid inside -> kinds of namespaces in which a process of the desktop is not with init."""
    init = namespace_inodes(view.pid1)
    apart: dict[str, Json] = {}
    for pid in processes_in_pidns(init["pid"]):
        try:
            namespaces, inside = namespace_inodes(pid), read_nspid(pid)[-1]
        except (FileNotFoundError, ProcessLookupError):
            if is_alive(pid):
                raise
            continue
        if kinds := [kind for kind in KINDS if namespaces[kind] != init[kind]]:
            apart[str(inside)] = kinds
    return apart


def _check(view: DesktopView, evidence: dict[str, Json]) -> Finding:
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
    if faults:
        return failed(some(faults), observed=bounded(faults))
    for inside, kinds in _apart(view).items():
        if new := [kind for kind in kinds if kind not in evidence.get(inside, [])]:
            faults.append(f"process {inside} inside is in another {' and '.join(new)} namespace than the desktop's")
    return failed(some(faults), observed=bounded(faults)) if faults else passed()


@final
class IsolationGate:
    """Every process of the desktop, not only init."""

    phase = Phase.PRE_RESUME
    records = True

    async def record(self, view: DesktopView) -> Json:
        """Which processes are not in init's own namespaces: those that made some for themselves."""
        return {"apart": await trio.to_thread.run_sync(_apart, view)}

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether no process shares a namespace with the host or another desktop, or has one of its own that is new."""
        apart = evidence.get("apart") if isinstance(evidence, dict) else None
        if not isinstance(apart, dict):
            return no_evidence("namespaces", evidence)
        return await trio.to_thread.run_sync(_check, view, apart)


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("isolation", IsolationGate)
