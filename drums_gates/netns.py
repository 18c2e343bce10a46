"""Gate `netns`: the network namespace equals that of the checkpoint, and is the desktop's own."""

from __future__ import annotations

from typing import final

import trio

from drums_core.abc import DesktopView
from drums_core.evidence import network
from drums_core.evidence.processes import namespace_inodes
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase, failed, passed
from drums_gates._report import differs, no_evidence


def _read(view: DesktopView) -> Json:
    return network.read_network(view.pid1)


def _check(view: DesktopView, evidence: dict[str, Json]) -> Finding:
    own = namespace_inodes(view.pid1)["net"]
    if own != view.namespaces["net"]:
        return failed(
            f"init is in network namespace {own}, expected {view.namespaces['net']}",
            observed=own,
            expected=view.namespaces["net"],
        )
    if own == namespace_inodes("self")["net"]:
        return failed("the desktop is in the host's network namespace", observed=own)
    for slot, namespaces in view.others.items():
        if namespaces.get("net") == own:
            return failed(f"the desktop shares its network namespace with desktop {slot!r}", observed=own)
    differences = network.difference(evidence, network.read_network(view.pid1))
    return differs("the network", differences) if differences else passed()


@final
class NetnsGate:
    """Links, addresses, routes, rules and nftables rule sets."""

    phase = Phase.PRE_RESUME
    records = True

    async def record(self, view: DesktopView) -> Json:
        """The normalised network."""
        return await trio.to_thread.run_sync(_read, view)

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether it is equal, in a namespace of its own."""
        if not isinstance(evidence, dict) or set(evidence) != set(network.SECTIONS):
            return no_evidence("the network", evidence)
        return await trio.to_thread.run_sync(_check, view, evidence)


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("netns", NetnsGate)
