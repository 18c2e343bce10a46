"""Cancelling something at each of its checkpoints in turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from drums_core.testing.conformance import expect

MOST_STEPS = 25
_END_S = 30.0


class _CancelAt(trio.abc.Instrument):
    """Cancels a scope once a task has come to its n-th checkpoint."""

    def __init__(self, task: trio.lowlevel.Task, scope: trio.CancelScope, steps: int) -> None:
        self._task, self._scope, self._left = task, scope, steps

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._left -= 1
            if self._left == 0:
                self._scope.cancel()


async def cancelled_everywhere(function: Callable[[], Awaitable[object]]) -> int:
    """Call it again and again, cancelled at its first checkpoint, its second, and so on; how often that was.

    Raises:
        Broken: it goes on for long after it was cancelled.
        Exception: what it raised instead of being cancelled.
    """
    for steps in range(1, MOST_STEPS + 1):
        with trio.CancelScope() as scope:
            instrument = _CancelAt(trio.lowlevel.current_task(), scope, steps)
            trio.lowlevel.add_instrument(instrument)
            began = trio.current_time()
            try:
                await function()
            finally:
                trio.lowlevel.remove_instrument(instrument)
        expect(trio.current_time() - began < _END_S, f"cancelled at checkpoint {steps}, it went on for {_END_S:g} s")
        if not scope.cancelled_caught:
            return steps - 1  # it has no more checkpoints than that
    return MOST_STEPS
