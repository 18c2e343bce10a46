"""Gate `cgroup`: the desktop's processes, and no others, are in its own cgroup with the limits asked for."""

from __future__ import annotations

from typing import final

import attrs
import trio

from drums_core.abc import DesktopView
from drums_core.evidence.processes import processes_in_pidns
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, KernelLimits, Limits, Phase, failed, passed
from drums_gates._report import bounded, some

# The kernel keeps CPU time as whole microseconds of a period of 0.1 s.
_CPU_TOLERANCE = 1e-5


def _differences(asked: Limits, read: KernelLimits) -> list[str]:
    found = []
    for name, wanted in attrs.asdict(asked).items():
        have = getattr(read, name)
        equal = have is not None and abs(have - wanted) <= (_CPU_TOLERANCE if name == "cpus" else 0)
        if not equal:
            found.append(f"{name} is {'unlimited' if have is None else have}, expected {wanted}")
    return found


def _check(view: DesktopView) -> Finding:
    desktop = frozenset(processes_in_pidns(view.namespaces["pid"]))
    if view.pid1 not in desktop:
        return failed(f"init, host pid {view.pid1}, is not a live process of the desktop's pid namespace")
    paths = list(view.cgroup.paths)
    if not paths:
        return failed("the desktop has no cgroup of its own")
    members = view.cgroup.members()
    faults = []
    for path in paths:
        inside = members.get(path)
        if inside is None:
            faults.append(f"the members of {str(path)!r} could not be read")
            continue
        if missing := sorted(desktop - inside):
            faults.append(
                f"{len(missing)} processes of the desktop are not in {str(path)!r}: host pids {some(missing)}"
            )
        if strangers := sorted(inside - desktop):
            faults.append(f"{len(strangers)} strangers are in {str(path)!r}: host pids {some(strangers)}")
    if faults:
        return failed(some(faults), observed=bounded(faults))
    read = view.cgroup.read_limits()
    if faults := _differences(view.limits, read):
        return failed(
            f"the kernel's limits are not those asked for: {some(faults, len(faults))}",
            observed=attrs.asdict(read),
            expected=attrs.asdict(view.limits),
        )
    return passed()


@final
class CgroupGate:
    """Membership and limits as the kernel has them."""

    phase = Phase.PRE_RESUME
    records = False

    async def record(self, view: DesktopView) -> Json:
        """Nothing: what must hold is what was asked for."""
        return None

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether each process is in each of the desktop's cgroup directories, alone, with the limits."""
        return await trio.to_thread.run_sync(_check, view)


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("cgroup", CgroupGate)
