"""The gate `hostname`: the desktop's `/etc/hostname` is the same after a restore."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import trio

from drums_core.abc import DesktopView, EventGate, Gate
from drums_core.hookspecs import RegisterFaults, RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase, failed, passed
from drums_core.testing.faults import Fault, Point


class HostnameGate:
    """Equal to what was recorded, at the last moment before the first instruction."""

    phase = Phase.PRE_RESUME
    records = True

    async def record(self, view: DesktopView) -> Json:
        """The host name."""
        return await trio.to_thread.run_sync(_read, str(view.root / "etc/hostname"))

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether it is still that."""
        now = await self.record(view)
        return passed() if now == evidence else failed("the host name changed", observed=now, expected=evidence)


def _read(path: str) -> str:
    # The tree is the agent's as well: a link would lead to the host's own files.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        return file.read(256).strip()


def _factory() -> Gate | EventGate:
    return HostnameGate()


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """The gate, under the name of its entry point."""
    register("hostname", _factory)


def _faults() -> Sequence[Fault]:
    return [
        Fault(
            "hostname",
            ("hostname",),
            Point.PRE_RESUME,
            "the host name is another",
            "change_hostname",
            Path(__file__).with_name("plant.py"),
            says=("the host name changed",),
        )
    ]


@hookimpl
def drums_register_faults(register: RegisterFaults) -> None:
    """What shows that the gate sees something: `drums gates selftest hostname`."""
    register("hostname", _faults)
