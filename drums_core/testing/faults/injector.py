"""Planting faults at the points of desktops' lives."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from drums_core.testing.faults.model import Fault, FaultNotPlanted, Point

if TYPE_CHECKING:
    from drums_core.services import Interposer, Interposition


@attrs.define(eq=False)
class Armed:
    """A fault that is to be planted once.

    Args:
        fault: the fault.
        slot: the desktop that gets it; "" until one has taken it.
        other_pid1: host pid of another desktop's init, for faults that mix two desktops up.
        other_cgroups: that desktop's cgroup directories.
        planted: whether it has been made, or tried to be.
        problem: why it could not be made.
    """

    fault: Fault
    slot: str = ""
    other_pid1: int = 0
    other_cgroups: tuple[Path, ...] = ()
    planted: bool = False
    problem: Exception | None = None

    async def plant(self, at: Interposition) -> None:
        """Make it in this desktop; raises as `Fault.plant`."""
        self.planted = True
        try:
            await self.fault.plant(at, other_pid1=self.other_pid1, other_cgroups=self.other_cgroups)
        except Exception as e:
            self.problem = e
            raise


@attrs.define(eq=False)
class FaultInjector:
    """An interposer that plants what is armed, once each, and else does nothing.

    Desktops that start side by side do not take each other's faults: one that is armed for "the next desktop" is
    for the next that the *arming task*, or a task that it starts, restores. One desktop takes one such fault.

    Args:
        armed: all that there is.
        raises: whether a fault that cannot be made breaks its desktop off; else only `Armed.problem` says so.
        before: another interposer, called first.
    """

    armed: list[Armed] = attrs.field(factory=list)
    raises: bool = True
    before: Interposer | None = None
    _mine: ContextVar[Sequence[Armed]] = attrs.field(factory=lambda: ContextVar("drums_faults", default=()))

    def arm(self, fault: Fault, *, slot: str = "", other_pid1: int = 0, other_cgroups: tuple[Path, ...] = ()) -> Armed:
        """Let a fault be planted at its point, in this slot's desktop or in the next one."""
        armed = Armed(fault, slot, other_pid1, other_cgroups)
        self.armed.append(armed)
        if not slot:
            self._mine.set((*self._mine.get(), armed))
        return armed

    async def __call__(self, at: Interposition) -> None:
        """Called by the host at each point of each desktop's life."""
        if self.before is not None:
            await self.before(at)
        if at.point in (Point.FROZEN, Point.REBUILT):  # of a dump, and of a restore
            dumping = at.point == Point.FROZEN
            free = [x for x in self._mine.get() if not x.slot and (x.fault.point is Point.FROZEN) is dumping]
            if free:
                free[0].slot = at.slot
        for armed in self.armed:
            if armed.slot == at.slot and armed.fault.point == at.point and not armed.planted:
                try:
                    await armed.plant(at)
                except FaultNotPlanted:
                    if self.raises:
                        raise
