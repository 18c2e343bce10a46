"""The state of a slot, and the operations that it admits: by that state, and one at a time."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from drums.errors import InvalidTransition, SlotBusy, SlotNotFound, SlotQuarantined
from drums_core.ports import PortUses

_BESIDE_PORTS = ("", "step", "execute", "write_file")
"""Operations that go on beside connections to the desktop's ports; at the beginning of another these are closed."""


class SlotState(enum.StrEnum):
    """Where a slot is; see DESIGN: starting, up, quarantined, down, failed, closed."""

    STARTING = "starting"
    UP = "up"
    QUARANTINED = "quarantined"
    DOWN = "down"
    FAILED = "failed"
    CLOSED = "closed"


@attrs.define(eq=False)
class StateMachine:
    """Where one slot is, and what goes on there.

    Args:
        slot: its id.
        ports: the connections to its desktop, which end with what cannot go on beside them.
        on_enter: told of every state that is entered, and why.
    """

    slot: str
    ports: PortUses
    on_enter: Callable[[SlotState, str], None]
    state: SlotState = SlotState.STARTING
    reason: str = ""
    _lock: trio.Lock = attrs.field(factory=trio.Lock)
    _operation: str = ""

    def enter(self, state: SlotState, reason: str = "") -> None:
        """Be in this state from now on."""
        self.state, self.reason = state, reason
        if state is not SlotState.UP:
            self.ports.end(f"slot {self.slot} is {state.value}")
        self.on_enter(state, reason)

    def require(self, operation: str, *allowed: SlotState) -> None:
        """Refuse an operation in other states than these.

        Raises:
            SlotNotFound, SlotQuarantined, InvalidTransition: by the state that it is in.
        """
        if self.state in allowed:
            return
        facts: dict[str, Any] = {"slot": self.slot, "state": self.state.value, "operation": operation}
        if self.state is SlotState.CLOSED:
            raise SlotNotFound(f"slot {self.slot} is closed", **facts)
        if self.state is SlotState.QUARANTINED:
            raise SlotQuarantined(
                f"slot {self.slot} is quarantined ({self.reason}), so {operation!r} is refused",
                hint="release it and reset it, or close it",
                **facts,
            )
        names = " or ".join(s.value for s in allowed)
        raise InvalidTransition(f"slot {self.slot} is {self.state.value}; {operation!r} needs it {names}", **facts)

    def require_port(self) -> None:
        """Refuse a connection to a port where it could not be used now.

        Raises:
            SlotBusy: an operation is under way that does not go on beside it.
        """
        self.require("port", SlotState.UP)
        if self._operation not in _BESIDE_PORTS:
            raise self._busy("port")

    @asynccontextmanager
    async def operating(self, operation: str, *allowed: SlotState) -> AsyncIterator[None]:
        """One mutating operation at a time, and only in these states.

        Raises:
            SlotBusy: another one is under way.
        """
        self.require(operation, *allowed)
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            raise self._busy(operation) from None
        self._operation = operation
        if operation not in _BESIDE_PORTS:
            self.ports.end(f"{operation!r} of slot {self.slot} began")
        try:
            yield
        finally:
            self._operation = ""
            self._lock.release()

    @asynccontextmanager
    async def turn(self, operation: str = "") -> AsyncIterator[None]:
        """Wait for an operation under way, then let no other begin, whatever the state.

        Args:
            operation: what others are told is under way.
        """
        async with self._lock:
            self._operation = operation
            try:
                yield
            finally:
                self._operation = ""

    def _busy(self, operation: str) -> SlotBusy:
        return SlotBusy(
            f"slot {self.slot} is busy with {self._operation!r}, so {operation!r} is refused",
            hint="try again when it is done",
        )
