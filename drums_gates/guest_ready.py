"""Gate `guest_ready`: the guest server answers over the path that clients use, within the time limit."""

from __future__ import annotations

from typing import final

import trio

from drums.errors import GuestError
from drums_core.abc import DesktopView
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase, failed, passed

_FIRST_PAUSE_S = 0.002  # a restored desktop answers within a few milliseconds
_LONGEST_PAUSE_S = 0.25


@final
class GuestReadyGate:
    """Asks until there is an answer."""

    phase = Phase.READY
    records = False

    async def record(self, view: DesktopView) -> Json:
        """Nothing."""
        return None

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether the guest server proved itself in time; a question that hangs ends with the limit."""
        last = "no answer to the first question"
        questions = 0
        pause = _FIRST_PAUSE_S
        with trio.move_on_after(view.ready_limit_s):
            while True:
                questions += 1
                try:
                    await view.guest.health()
                    return passed()
                except (GuestError, OSError, trio.BrokenResourceError) as e:
                    last = f"{type(e).__name__}: {e}"
                await trio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)
        return failed(
            f"the guest server did not answer within {view.ready_limit_s:g} s ({questions} questions), last: {last}",
            observed=last[:500],
            expected=f"an answer within {view.ready_limit_s:g} s",
        )


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("guest_ready", GuestReadyGate)
