"""Workers that wait for a job, so that a check does not wait for a sandbox and an interpreter.

A waiting worker has seen no desktop, no task and no code but drums' own and the standard library's: what a checker's
code is comes in with the job. It gets one job, and is ended with it. That one has died while it waited is nobody's
error: nothing of the job has run, so another one is given it.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import attrs
import structlog
import trio

from drums.errors import CheckerError
from drums_verifiers.worker import Job, Kind, NotBegun, Worker, start_worker

_log = structlog.get_logger("drums.workers")
LOOK_EVERY_S = 2.0


@attrs.define(eq=False)
class Workers:
    """The workers of one checker.

    Args:
        kind: of all of them.
        waiting: how many wait at once while `serve` runs; without it each is started for its job.
    """

    kind: Kind
    waiting: int = 0
    _idle: list[Worker] = attrs.field(factory=list)
    _wanted: trio.Event = attrs.field(factory=trio.Event)

    async def run(self, job: Job) -> dict[str, Any]:
        """Have a worker do a job, and return its answer. Needs root.

        Raises:
            CheckerError: there is none; `.output` is the end of what the worker printed.

        When it returns, or raises, the worker is gone with everything that it started; cancellation waits for that.
        """
        while self._idle:
            worker = self._idle.pop(0)  # from here on it is this task's
            try:
                return await worker.answer(job)
            except NotBegun as e:
                _log.warning("a waiting worker was of no use", error=e.message)
            finally:
                await worker.end()
                self._wanted.set()  # and not before: its start would take the job's processor time
        worker = await start_worker(self.kind)
        try:
            return await worker.answer(job)
        finally:
            await worker.end()

    async def serve(self) -> None:
        """Keep workers waiting until cancelled; none is left then."""
        try:
            while True:
                self._wanted = trio.Event()
                try:
                    await self._fill()
                except (CheckerError, OSError) as e:  # a job then starts its own, and tells of it
                    _log.error("no worker can be kept waiting", error=str(e))
                with trio.move_on_after(LOOK_EVERY_S):
                    await self._wanted.wait()
        finally:
            async with AsyncExitStack() as stack:
                while self._idle:
                    stack.push_async_callback(self._idle.pop().end)

    async def _fill(self) -> None:
        dead = [x for x in self._idle if not x.waits]
        self._idle[:] = [x for x in self._idle if x.waits]  # at once: `run` takes from it while others are ended
        for worker in dead:
            _log.warning("a worker ended while it waited", code=worker.process.returncode)
            await worker.end()
        while len(self._idle) < self.waiting:
            self._idle.append(await start_worker(self.kind))
