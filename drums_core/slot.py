"""A slot: a desktop's place on the host, how it lives there, and everything that a user does with it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from drums.errors import (
    DesktopError,
    InvalidTransition,
    SetupFailed,
    SlotNotFound,
)
from drums_core.abc import CommandResult
from drums_core.as_user import act_as_user, execute_as_user, read_as_user, upload_as_user
from drums_core.blame import listening
from drums_core.checkpoint import Checkpoint, task_document
from drums_core.desktop import Desktop
from drums_core.desktop_watch import DesktopWatch
from drums_core.end_states import KIND, EndState
from drums_core.episode import Episode
from drums_core.forking import fork_slot
from drums_core.guest_client import GuestClient
from drums_core.model import (
    DesktopEvent,
    Json,
    OutOfMemory,
    Phase,
    Quarantined,
    Reward,
    Status,
    Task,
)
from drums_core.ports import PortUses, require_allowed
from drums_core.setup import run_steps
from drums_core.slot_state import SlotState, StateMachine
from drums_core.verifying import verify

if TYPE_CHECKING:
    from drums_core.host import Host

_log = structlog.get_logger("drums.slot")
SPECIAL_ACTIONS = ("WAIT", "DONE", "FAIL")


@attrs.define(eq=False)
class Slot:
    """One desktop's place. Made by `Host.create` and `Slot.fork`; close it, or use it as a context manager."""

    host: Host
    base: Checkpoint
    task: Task | None
    setup_at_reset: bool
    ttl_s: float | None
    id: str = attrs.field(factory=lambda: f"d-{uuid.uuid4().hex[:12]}")
    created_at: float = attrs.field(factory=time.time)
    desktop: Desktop | None = None
    _episode: Episode | None = None
    _deadline: float = float("inf")
    _watch: DesktopWatch | None = None
    _acted_before: bool = False
    _beginning: trio.CancelScope | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    ports: PortUses = attrs.field(factory=PortUses)
    states: StateMachine = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.states = StateMachine(self.id, self.ports, self._on_state)

    async def __aenter__(self) -> Slot:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- what it is

    @property
    def state(self) -> SlotState:
        """Where it is."""
        return self.states.state

    @property
    def reason(self) -> str:
        """Why it is there, "" where that needs none."""
        return self.states.reason

    @property
    def episode(self) -> Episode:
        """The current episode."""
        if self._episode is None:
            raise InvalidTransition(f"slot {self.id} has no episode yet", state=self.state.value, operation="episode")
        return self._episode

    @property
    def guest(self) -> GuestClient:
        """The guest server of a living desktop."""
        if self.desktop is None or self.desktop.guest is None:
            raise InvalidTransition(
                f"slot {self.id} has no desktop: it is {self.state.value}", state=self.state.value, operation="ask"
            )
        return self.desktop.guest

    @property
    def has_acted(self) -> bool:
        """Whether the agent has acted in the current episode, or in the one that its checkpoint was taken in.

        What it left running there runs on here.
        """
        return self._episode is not None and (self._episode.actions > 0 or self._acted_before)

    def _count_action(self) -> None:
        if not self.has_acted and self.desktop is not None:
            self.episode.listened = listening(self.desktop.pid1)
        self.episode.actions += 1

    def describe(self) -> dict[str, Json]:
        """The slot as JSON."""
        episode = self._episode
        return {
            "id": self.id,
            "state": self.state.value,
            "reason": self.reason,
            "task": self.task.id if self.task else None,
            "image": self.base.manifest.image,
            "episode": episode.id if episode else None,
            "verdict": episode.validity.verdict.value if episode else None,
            "ttl_s": self.ttl_s,
            "expires_in_s": self.expires_in_s(),
            "created_at": self.created_at,
            "labels": dict(self.labels),
        }

    def expires_in_s(self) -> float | None:
        """Seconds until the lease ends, None when it does not."""
        left = self._deadline - trio.current_time()
        return None if left == float("inf") else max(0.0, left)

    # --- life

    async def begin(
        self,
        checkpoint: Checkpoint,
        origin: str,
        *,
        setup: bool,
        acted: bool = False,
        parent: tuple[Episode, int] | None = None,
    ) -> None:
        """`start` as the slot's first operation; closing the slot meanwhile cancels it.

        Raises:
            SlotNotFound: it was closed meanwhile, by somebody else or by the end of its lease.
        """
        async with self.states.turn(origin):
            try:
                with trio.CancelScope() as self._beginning:
                    await self.start(checkpoint, origin, setup=setup, acted=acted, parent=parent)
                    self.set_lease(self.ttl_s)  # from now on: making it takes no time of it
                    self.host.nursery.start_soon(self.keep_lease)
                if self._beginning.cancelled_caught:
                    raise SlotNotFound(f"slot {self.id} was closed while it was being made", slot=self.id)
            finally:
                self._beginning = None

    async def start(
        self,
        checkpoint: Checkpoint,
        origin: str,
        *,
        setup: bool,
        acted: bool = False,
        parent: tuple[Episode, int] | None = None,
    ) -> None:
        """Restore a checkpoint as a new episode and, if asked, run the task's set-up. Leaves nothing when it fails."""
        services = self.host.services
        self.states.enter(SlotState.STARTING)
        image = await trio.to_thread.run_sync(self.host.image_of, checkpoint)
        pinned = await trio.to_thread.run_sync(self.host.pin, self.task)
        desktop = Desktop(services, self.id, services.config.limits)
        self._episode = self.host.new_episode(self, origin, checkpoint)
        self._episode.parent, self._episode.pinned = parent, pinned
        self.desktop = desktop
        self._acted_before = acted or checkpoint.manifest.kind != "golden"
        try:
            await desktop.start_from(checkpoint, image.layer, self._episode)
            # The 5 s of `alive_after_resume` begin at ready, whatever the set-up does meanwhile.
            self._watch = DesktopWatch(self, desktop, self._episode, checkpoint, self._on_init_ended)
            self.host.nursery.start_soon(self._watch.run)
            if setup and self.task is not None and self.task.config:
                self._require_ready(self.task.config[0].type)
                await run_steps(self, self.task.config)
            await self.host.journal.flush()  # an episode that is answered is on disk
            if self.state is SlotState.FAILED:
                raise DesktopError(f"slot {self.id}: {self.reason} during its set-up")
        except BaseException as e:
            await self._end_desktop()
            self.states.enter(SlotState.FAILED, f"{type(e).__name__}: {e}")
            raise
        if self.state is SlotState.STARTING:  # not quarantined meanwhile
            self.states.enter(SlotState.UP)

    def _require_ready(self, first_step: str) -> None:
        """A set-up cannot run in a desktop that does not answer; without one the episode is just invalid."""
        for result in self.episode.results:
            if result.phase is Phase.READY and result.status is Status.FAIL:
                raise SetupFailed(f"the set-up cannot run: {result.reason}", index=0, step_type=first_step, output="")

    async def _end_desktop(self) -> None:
        self.ports.end(f"the desktop of slot {self.id} ends")
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self._episode is not None:
            self.host.end_episode(self._episode)
        if self.desktop is not None:
            desktop, self.desktop = self.desktop, None
            await desktop.stop()

    def set_lease(self, ttl_s: float | None) -> None:
        """Let the lease end `ttl_s` seconds from now; None is never."""
        self.ttl_s = ttl_s
        self._deadline = float("inf") if ttl_s is None else trio.current_time() + ttl_s

    def extend(self, ttl_s: float | None) -> None:
        """Let the slot live `ttl_s` seconds from now on; None is for ever, where the host allows it.

        Raises:
            ConfigError: this host does not allow it.
        """
        self.states.require("extend", *(state for state in SlotState if state is not SlotState.CLOSED))
        self.set_lease(self.host.lease(ttl_s))

    async def keep_lease(self) -> None:
        """Close the slot when its lease ends; runs in the host's nursery for the slot's life."""
        while self.state is not SlotState.CLOSED:
            left = self._deadline - trio.current_time()
            if left <= 0:
                _log.info("lease ended", slot=self.id)
                try:
                    await self.close(reason="its time to live ended")
                except DesktopError:
                    # Nobody waits for this one, and the others live on; the next host clears what is left.
                    _log.exception("a desktop could not be removed whole", slot=self.id)
                return
            await trio.sleep(min(left, 1.0))

    async def close(self, *, reason: str = "") -> None:
        """End the desktop and the slot; waits for an operation under way, its making apart. Twice is once."""
        if self._beginning is not None:
            self._beginning.cancel()
        async with self.states.turn():
            if self.state is SlotState.CLOSED:
                return
            try:
                await self._end_desktop()
            finally:
                self.states.enter(SlotState.CLOSED, reason)
                self.host.forget(self)

    async def reset(self) -> Episode:
        """Go back to the checkpoint that the root create started from, and run the set-up again: a new episode.

        Cancellation: nothing of either desktop is left; the slot is down.
        """
        async with self.states.operating("reset", SlotState.UP, SlotState.DOWN, SlotState.FAILED):
            await self._end_desktop()
            self.states.enter(SlotState.DOWN)
            try:
                await self.start(self.base, "reset", setup=self.setup_at_reset)
            except BaseException:
                self.states.enter(SlotState.DOWN, self.reason)
                raise
            return self.episode

    async def fork(self, count: int = 1) -> list[Slot]:
        """Freeze, dump, run on, and restore `count` children side by side, each a new slot and episode.

        Raises:
            CapacityExhausted: not that many free slots; nothing starts.
            DumpError, RestoreError: no child is left.
        """
        if count < 1:
            raise ValueError(f"count is {count}, it must be at least 1")
        async with self.states.operating("fork", SlotState.UP):
            return await fork_slot(self, count)

    async def save(self, name: str) -> Checkpoint:
        """Keep the desktop's state under a name; `create(checkpoint=name)` starts from it. Waits for the verdict.

        Raises:
            InvalidEpisode: a desktop that is not as it should be is not kept: what starts from it would pass for valid.
            CheckpointError: the name is taken, or not one to 64 letters, digits, dots, dashes and underscores.
        """
        async with self.states.operating("save", SlotState.UP):
            await trio.to_thread.run_sync(self.host.check_new_name, name)
            await self.episode.wait_valid()
            checkpoint = await self._dump(kind="saved", name=name)
            self.host.services.watcher.drain()
            if not self.episode.validity.valid:  # meanwhile
                await trio.to_thread.run_sync(self.host.services.store.discard, checkpoint.id)
                await self.episode.wait_valid()
            return checkpoint

    async def _dump(self, *, kind: str, name: str, end_state: Json = None) -> Checkpoint:
        desktop = self.desktop
        assert desktop is not None
        image = self.base.manifest
        facts: dict[str, Json] = {
            "name": name,
            "kind": kind,
            "image": image.image,
            "image_digest": image.image_digest,
            "task": task_document(self.task),
            "end_state": end_state,
        }
        if kind != "saved":
            facts["base"] = self.base.id
        try:
            return await desktop.dump(**facts)
        finally:
            if desktop.damaged:
                self._quarantine(desktop.damaged, by_user=False)

    # --- quarantine

    def quarantine(self, reason: str) -> None:
        """Mark the episode as broken: invalid, and the desktop refuses all but verify, release and close.

        Twice is once more: the later reason is added to the report.
        """
        self.states.require("quarantine", SlotState.UP, SlotState.QUARANTINED)
        self._quarantine(reason, by_user=True)

    def _quarantine(self, reason: str, *, by_user: bool) -> None:
        if self._episode is not None and not self._episode.closed:
            self.host.on_desktop_event(self.id, Quarantined(reason, by_user))
        if self.state in (SlotState.UP, SlotState.STARTING):
            self.states.enter(SlotState.QUARANTINED, reason)

    async def release(self) -> None:
        """End a quarantined desktop; the slot is down and can be reset."""
        async with self.states.operating("release", SlotState.QUARANTINED):
            await self._end_desktop()
            self.states.enter(SlotState.DOWN, "released from quarantine")

    # --- what happens to it

    def _on_state(self, state: SlotState, reason: str) -> None:
        self.host.publish("slot_state", self.id, {"state": state.value, "reason": reason})

    def _on_init_ended(self) -> None:
        reason = "the desktop's init ended"
        self._quarantine(reason, by_user=False)
        self.states.enter(SlotState.FAILED, reason)

    def on_event(self, event: DesktopEvent) -> None:
        """An event of the watcher: judged by the event gates of the current episode."""
        if self._episode is None or self._episode.closed:
            return
        self._episode.add(self.host.services.gates.judge_event(event))

    def check_oom(self) -> None:
        """Read the OOM counter; more than last time is an event."""
        if self.desktop is None or self._episode is None:
            return
        if (kills := self.desktop.new_oom_kills()) is not None:
            self.host.on_desktop_event(self.id, OutOfMemory(kills, self.has_acted))

    # --- using it

    async def wait_valid(self, timeout_s: float | None = None) -> None:
        """Return at `valid`; raises InvalidEpisode otherwise, TimeoutError after `timeout_s`."""
        try:
            await self.episode.wait_valid(timeout_s)
        finally:
            await self.host.journal.flush()

    def gates(self) -> dict[str, Json]:
        """The gate report of the current episode."""
        self.host.services.watcher.drain()
        self.check_oom()
        return self.episode.report()

    async def screenshot(self) -> bytes:
        """The screen as PNG."""
        self.states.require("screenshot", SlotState.UP, SlotState.QUARANTINED)
        return (await self.guest.call("GET", "/screenshot")).body

    async def accessibility(self) -> Json:
        """The accessibility tree, as the guest server gives it: `{"AT": xml}`."""
        self.states.require("accessibility", SlotState.UP, SlotState.QUARANTINED)
        return (await self.guest.call("GET", "/accessibility")).json()

    async def read_file(self, path: str) -> bytes:
        """A regular file of the desktop, read as the agent's user; relative paths begin at its home.

        Raises:
            GuestError: it cannot be read; `.guest_status` is 404 when it is not there.
        """
        self.states.require("read_file", SlotState.UP, SlotState.QUARANTINED)
        return await read_as_user(self.guest, path)

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a regular file of the desktop as the agent's user; its folders are made, an old file is overwritten.

        Raises:
            GuestError: it cannot be written.
        """
        async with self.states.operating("write_file", SlotState.UP):
            self._count_action()
            await upload_as_user(self.guest, path, content)

    async def step(self, action: str) -> Mapping[str, Json]:
        """One action of the agent: pyautogui code, or WAIT, DONE or FAIL.

        Returns:
            `status`, `output`, `error` and `returncode` of the code.
        """
        async with self.states.operating("step", SlotState.UP):
            episode = self.episode
            episode.last_action = action
            self._count_action()
            if action in SPECIAL_ACTIONS:
                return {"status": "success", "output": "", "error": "", "returncode": 0}
            return await act_as_user(self.guest, action)

    async def execute(
        self, command: str | Sequence[str], *, shell: bool = False, timeout_s: float = 120.0
    ) -> CommandResult:
        """A command as the agent's user."""
        async with self.states.operating("execute", SlotState.UP):
            self._count_action()
            return await execute_as_user(self.guest, "/execute", command, shell=shell, timeout_s=timeout_s)

    @asynccontextmanager
    async def connect_port(self, port: int) -> AsyncIterator[trio.SocketStream]:
        """A connection to a port of the desktop; opening it is an action of the agent.

        Steps, commands and other connections go on beside it.

        Raises:
            PortNotAllowed: the host's configuration does not list it.
            PortError: nothing listens there.
            PortClosed: another operation began, or the desktop takes no more actions; the block was cancelled.
        """
        require_allowed(port, self.host.config.ports)
        self.states.require_port()
        guest = self.guest
        self._count_action()
        async with self.ports.open(guest.netns_fd, port) as stream:
            yield stream

    async def snapshot(self, *, keep: bool = False) -> Checkpoint:
        """A checkpoint of the desktop as it is, which is removed when nobody uses it any more; it runs on.

        Args:
            keep: let it last, as the episode's end state.

        Raises:
            DumpError: it could not be made.
        """
        if keep:
            return await self._dump(kind=KIND, name=self.episode.id, end_state=attrs.asdict(EndState.of(self)))
        return await self._dump(kind="fork", name="")

    async def verify(self, *, strict: bool = True, in_place: bool | None = None, keep: bool | None = None) -> Reward:
        """Wait for the verdict, then score a frozen copy of the desktop, which runs on untouched.

        Args:
            strict: raise instead of returning a reward that is not valid, or that has no score.
            in_place: score the desktop itself, while its processes run; None is as the host is configured.
            keep: keep the graded copy's checkpoint as the episode's end state, for `Host.reverify`; likewise.

        Raises:
            ConfigError: `keep` without a copy.
            InvalidEpisode: `.reward` rides along.
            CheckerError: the checker failed in a valid episode; `.reward` rides along.
            JournalError: the reward could not be put on disk, so there is none.
            ValueError: the slot has no task.
        """
        if self.task is None:
            raise InvalidTransition(f"slot {self.id} has no task, so there is nothing to verify", operation="verify")
        return await verify(self, strict=strict, in_place=in_place, keep=keep)
