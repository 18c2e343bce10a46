"""Gate `init_identity`: exactly one init, pid 1 of its own pid namespace, and it is the one of the checkpoint."""

from __future__ import annotations

from typing import final

import trio

from drums_core.abc import DesktopView
from drums_core.evidence.processes import (
    namespace_inodes,
    processes_in_pidns,
    read_argv,
    read_executable,
    read_nspid,
    read_stat,
)
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase, failed, passed
from drums_gates._report import no_evidence, some


def _identity(pid: int) -> dict[str, Json]:
    return {"command": read_stat(pid).command, "argv": list(read_argv(pid)), "executable": read_executable(pid)}


def _check(view: DesktopView, evidence: dict[str, Json]) -> Finding:
    own = namespace_inodes(view.pid1)["pid"]
    if own != view.namespaces["pid"]:
        return failed(
            f"init is in pid namespace {own}, expected {view.namespaces['pid']}",
            observed=own,
            expected=view.namespaces["pid"],
        )
    if own == namespace_inodes("self")["pid"]:
        return failed("init is in the host's pid namespace, it has none of its own")
    # Of any pid namespace: one below the desktop's has an init that is none of the desktop's.
    inits = []
    for pid in sorted({*processes_in_pidns(own)}.union(*view.cgroup.members().values())):
        try:
            if read_nspid(pid)[-1] == 1:
                inits.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    if inits != [view.pid1]:
        return failed(
            f"{len(inits)} processes are pid 1 inside (host pids {some(inits) or 'none'}), "
            f"expected exactly one, host pid {view.pid1}",
            observed=inits,
            expected=[view.pid1],
        )
    levels = read_nspid(view.pid1)
    if len(levels) < 2:
        return failed(f"init is not in a pid namespace below the host's: NSpid is {levels}", observed=levels)
    observed = _identity(view.pid1)
    if observed["argv"] != list(view.init_argv):
        return failed(
            f"init's command line is {observed['argv']}, expected {list(view.init_argv)}",
            observed=observed["argv"],
            expected=list(view.init_argv),
        )
    for name, wanted in evidence.items():
        if observed.get(name) != wanted:
            return failed(
                f"init's {name} is {observed.get(name)!r}, the checkpoint's was {wanted!r}",
                observed=observed,
                expected=evidence,
            )
    return passed()


@final
class InitIdentityGate:
    """Who pid 1 is."""

    phase = Phase.PRE_RESUME
    records = True

    async def record(self, view: DesktopView) -> Json:
        """Init's command, command line and program."""
        return await trio.to_thread.run_sync(_identity, view.pid1)

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether there is one init and it is that one."""
        if not isinstance(evidence, dict) or set(evidence) != {"command", "argv", "executable"}:
            return no_evidence("init", evidence)
        return await trio.to_thread.run_sync(_check, view, evidence)


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("init_identity", InitIdentityGate)
