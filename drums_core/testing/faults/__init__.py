"""Real faults, planted in living desktops: what shows that a gate sees what it is there to see.

A fault is made in the kernel or on disk by a process of its own (`drums_core.testing.plant`) that knows no gate, or by
the agent or the user in the ordinary way. Nothing here touches evidence or gates, or imports them: a fault only *names*
the gates that have to fail.

    faults = FaultInjector()
    async with open_host(config, interposer=faults) as host:
        faults.arm(fault("state_hash"))
        slot = await host.create()  # its episode turns invalid, and names state_hash
"""

from __future__ import annotations

from collections.abc import Mapping

from drums_core.testing.faults.alive import ALIVE_FAULTS
from drums_core.testing.faults.cgroup import CGROUP_FAULTS
from drums_core.testing.faults.events import EVENT_FAULTS
from drums_core.testing.faults.files import FILE_FAULTS
from drums_core.testing.faults.guest import GUEST_FAULTS
from drums_core.testing.faults.init import INIT_FAULTS
from drums_core.testing.faults.injector import Armed, FaultInjector
from drums_core.testing.faults.isolation import ISOLATION_FAULTS
from drums_core.testing.faults.locks import LOCK_FAULTS
from drums_core.testing.faults.model import By, Fault, FaultNotPlanted, Need, NotOnThisHost, Point
from drums_core.testing.faults.mounts import MOUNT_FAULTS
from drums_core.testing.faults.netns import NETNS_FAULTS
from drums_core.testing.faults.quarantine import QUARANTINE_FAULTS

__all__ = [
    "FAULTS",
    "Armed",
    "By",
    "Fault",
    "FaultInjector",
    "FaultNotPlanted",
    "Need",
    "NotOnThisHost",
    "Point",
    "fault",
]

FAULTS: Mapping[str, Fault] = {
    x.name: x
    for x in [
        *LOCK_FAULTS,
        *CGROUP_FAULTS,
        *INIT_FAULTS,
        *MOUNT_FAULTS,
        *NETNS_FAULTS,
        *GUEST_FAULTS,
        *FILE_FAULTS,
        *ISOLATION_FAULTS,
        *ALIVE_FAULTS,
        *EVENT_FAULTS,
        *QUARANTINE_FAULTS,
    ]
}
"""The fault matrix: every fault by name. Each gate names one of them."""


def fault(name: str) -> Fault:
    """The fault with this name: that of a gate gives the plainest fault that this gate sees.

    Raises:
        LookupError: there is none.
    """
    try:
        return FAULTS[name]
    except KeyError:
        raise LookupError(f"no fault {name!r}; there are {', '.join(FAULTS)}") from None
