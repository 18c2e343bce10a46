"""The copy of a desktop that `verify` grades: forked for it, frozen, asked, and thrown away.

It is no episode and takes no slot. Its gates up to `ready` must pass. Once `postconfig` has run its processes are
frozen, and the checker's requests go to the examiner, which runs all the same; they are thawed only while a request
needs them, and each time is noted. See docs/adr/0005-grade-a-frozen-copy.md.
"""

from __future__ import annotations

import enum
import json
import math
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from drums.errors import CheckerError, CheckpointError, DesktopError, DrumsError, DumpError
from drums_core.checkpoint import UPPER
from drums_core.desktop import Desktop, in_thread
from drums_core.durable import locked
from drums_core.end_states import EndState
from drums_core.examiner import open_examiner
from drums_core.guest_client import GuestClient, Response
from drums_core.guest_gateway import LIVING
from drums_core.model import Cause, DesktopEvent, GateResult, Json, Limits, OutOfMemory, Phase, Status
from drums_core.ports import PortUses

if TYPE_CHECKING:
    from drums_core.checkpoint import Checkpoint
    from drums_core.host import Host
    from drums_core.slot import Slot

_log = structlog.get_logger("drums.copy")
PATIENCE_S = 3.0
FREEZE_LIMIT_S = 30.0  # a busy host's kernel takes its time with stopped and waiting processes
SPARE_PIDS = 256
SPARE_MEMORY_BYTES = 256 << 20
_JUDGED = (Phase.RESTORED, Phase.PRE_RESUME, Phase.READY)
# Answered by a process of the examiner's alone; and commands, which mostly are.
_FILES = frozenset({"/file", "/list_directory", "/desktop_path", "/platform", "/health"})
_COMMANDS = frozenset({"/execute", "/execute_with_verification", "/run_python", "/run_bash_script"})
_SCREEN = frozenset({"/screenshot", "/screen_size", "/cursor_position", "/window_size", "/windows"})
_STARTS = frozenset({"/setup/launch"})


class Living(enum.IntEnum):
    """Which processes of a copy run."""

    NOTHING = 0
    SESSION = 1  # root's, the guest server's, the display, the buses and the window manager
    EVERYTHING = 2  # and whatever the task and the agent have started


@attrs.define
class CopyRecord:
    """What a copy leaves: it is no episode, and the journal does not have it."""

    id: str  # of the episode that is graded
    notes: list[str] = attrs.field(factory=list)
    outputs: dict[str, str] = attrs.field(factory=dict)
    results: list[GateResult] = attrs.field(factory=list)

    def add(self, results: Sequence[GateResult]) -> None:
        """Results of its gates."""
        self.results.extend(results)

    def failed(self) -> list[GateResult]:
        """Those that failed."""
        return [r for r in self.results if r.status is not Status.PASS]


@attrs.define(eq=False)
class Copy:
    """One copy. Made by `open_copy`."""

    host: Host
    id: str  # of the slot, for whoever follows it
    desktop: Desktop
    checkpoint: Checkpoint
    has_acted: bool
    episode: CopyRecord
    thawed: list[dict[str, Json]] = attrs.field(factory=list)  # the requests that needed living processes
    _examiner: GuestClient | None = None
    _wanted: list[Living] = attrs.field(factory=list)
    _lock: trio.Lock = attrs.field(factory=trio.Lock)
    _stays: bool = False  # it lives on although nothing wants that, until a request that needs less
    _ports: PortUses = attrs.field(factory=PortUses)
    _can_be_asked: trio.Event = attrs.field(factory=trio.Event)
    fault: CheckerError | None = None  # it could not be frozen or thawed: no answer since counts

    @property
    def guest(self) -> GuestClient:
        """Its own guest server, for steps; it answers while the copy is not frozen."""
        assert self.desktop.guest is not None
        return self.desktop.guest

    # --- what happens to it

    def on_event(self, event: DesktopEvent) -> None:
        """An event of the watcher."""
        self.episode.add(self.host.services.gates.judge_event(event))

    def check_oom(self) -> None:
        """Read the OOM counter; more than last time is an event."""
        if (kills := self.desktop.new_oom_kills()) is not None:
            self.on_event(OutOfMemory(kills, self.has_acted))

    def require_sound(self, when: str) -> None:
        """Nothing, when every gate has passed and nothing in it broke.

        Raises:
            CheckerError: there can be no score; `.cause` is the gates'.
        """
        if self.fault is not None:
            raise self.fault
        self.host.services.watcher.drain()
        self.check_oom()
        failed = self.episode.failed()
        if not failed:
            return
        causes = {r.cause for r in failed}
        cause = Cause.AGENT if causes == {Cause.AGENT} else Cause.INFRASTRUCTURE
        reasons = [f"{r.gate}: {r.reason}" for r in failed]
        message = f"the copy that was to be graded {when}: {'; '.join(reasons)}"
        raise CheckerError(message, cause=cause, evidence=reasons)

    def _require_judged(self) -> None:
        self.require_sound("was not restored as it should be")
        passed = {r.gate for r in self.episode.results}
        wanted = {name for name, (phase, _) in self.host.services.gates.required.items() if phase in _JUDGED}
        if missing := sorted(wanted - passed):
            raise CheckerError(f"the copy that was to be graded was not judged: {missing}", cause=Cause.INFRASTRUCTURE)

    # --- asking it

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """Freeze it for the block, in which `request` can be used.

        Raises:
            CheckerError: it could not be frozen, or entered.
        """
        async with open_examiner(self.desktop) as self._examiner:
            async with self._lock:
                await self._enter(Living.NOTHING)
                await in_thread(lambda: self.desktop.cgroup.set_apart(self.desktop.strangers()))
            self._can_be_asked.set()
            try:
                yield
            finally:
                self._examiner = None

    async def request(
        self, method: str, target: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()
    ) -> Response:
        """One request to the examiner, with as few of the copy's processes alive as it needs.

        Raises:
            GuestError: there is no answer.
        """
        assert self._examiner is not None, "frozen() comes first"
        path = target.partition("?")[0]
        what = f"{method} {path}{_gist(path, body)}"
        if (LIVING, "everything") in headers:
            async with self._living(Living.EVERYTHING, what):
                return await self._examiner.request(method, target, body, headers)
        if path not in _FILES | _COMMANDS:
            wanted = Living.SESSION if path in _SCREEN else Living.EVERYTHING
            async with self._living(wanted, what, stays=path in _STARTS):
                return await self._examiner.request(method, target, body, headers)
        await self._rest()
        if path in _FILES:
            return await self._examiner.request(method, target, body, headers)
        ended = trio.Event()
        answers: list[Response | DrumsError] = []

        async def thaw_if_it_waits() -> None:
            with trio.move_on_after(PATIENCE_S):
                await ended.wait()
                return
            try:
                async with self._living(Living.SESSION, f"{what}: it had not ended after {PATIENCE_S:g} s"):
                    await ended.wait()
            except DrumsError as e:
                answers.insert(0, e)
                asking.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(thaw_if_it_waits)
            try:
                with trio.CancelScope() as asking:
                    answers.append(await self._examiner.request(method, target, body, headers))
            except DrumsError as e:  # raised below, as no group
                answers.append(e)
            finally:
                ended.set()
        if isinstance(answers[0], DrumsError):
            raise answers[0]
        return answers[0]

    @asynccontextmanager
    async def connect_port(self, port: int) -> AsyncIterator[trio.SocketStream]:
        """A stream to a port of it, once it is frozen, with everything in it alive.

        It lives on afterwards, as after the start of a program, until a request that needs less: a checker starts a
        browser, waits, and connects, and the browser has to come up meanwhile.

        Raises:
            PortError: nothing listens there.
        """
        await self._can_be_asked.wait()
        async with (
            self._living(Living.EVERYTHING, f"port {port}", stays=True),
            self._ports.open(self.guest.netns_fd, port) as stream,
        ):
            yield stream

    @asynccontextmanager
    async def _living(self, wanted: Living, what: str, *, stays: bool = False) -> AsyncIterator[None]:
        """Let a part of it live for the block; of requests at the same time, the greatest part that one needs.

        Args:
            stays: leave it so afterwards.
        """
        async with self._lock:
            note = {"living": wanted.name.lower(), "for": what}
            if note not in self.thawed:
                self.thawed.append(note)
            self._wanted.append(wanted)
            await self._enter(max(self._wanted))
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                async with self._lock:
                    self._wanted.remove(wanted)
                    self._stays = self._stays or stays
                    if not stays:
                        await self._enter(max(self._wanted, default=Living.NOTHING))

    async def _rest(self) -> None:
        """End what is alive for nobody."""
        async with self._lock:
            if self._stays:
                self._stays = False
                await self._enter(max(self._wanted, default=Living.NOTHING))

    async def _enter(self, living: Living) -> None:
        cgroup = self.desktop.cgroup

        def change() -> None:
            if living is Living.NOTHING:
                cgroup.freeze(timeout_s=FREEZE_LIMIT_S)
                return
            if living is Living.SESSION:
                cgroup.apart.freeze(timeout_s=FREEZE_LIMIT_S)
            cgroup.thaw(timeout_s=FREEZE_LIMIT_S)
            if living is Living.EVERYTHING:
                cgroup.apart.thaw(timeout_s=FREEZE_LIMIT_S)

        try:
            await in_thread(change)
        except (OSError, TimeoutError) as e:
            self.fault = CheckerError(f"the copy could not be frozen: {e}", cause=Cause.INFRASTRUCTURE)
            raise self.fault from e


def _gist(path: str, body: bytes) -> str:
    """What a request is about, for the note."""
    if path not in _COMMANDS:
        return ""
    try:
        document = json.loads(body)
        said = document.get("command") or document.get("code") or document.get("script")
    except (ValueError, AttributeError):
        return ""
    return f" {said if isinstance(said, str) else ' '.join(map(str, said or []))}"[:200]


@asynccontextmanager
async def open_copy(slot: Slot, *, keep: bool = False) -> AsyncIterator[Copy]:
    """Fork a slot's desktop for grading; at the end of the block nothing of the copy is left.

    The caller has waited for its turn (`Host.copy_limit`).

    Args:
        keep: leave the checkpoint, as the episode's end state; not where there is no copy, or the block is cancelled.

    Raises:
        CheckerError: it cannot be copied, or the copy is not as it should be; `.cause` where it is known.
    """
    try:
        checkpoint = await slot.snapshot(keep=keep)
    except DumpError as e:
        cause, seen = await trio.to_thread.run_sync(_cause_of_refusal, slot, e)
        raise CheckerError(
            f"the desktop cannot be copied, so it is not graded: {e.message}",
            hint="verify(in_place=True) grades the desktop itself",
            cause=cause,
            evidence=[str(e.facts.get("log_excerpt") or e.message)[-1000:], *seen],
        ) from e
    whole = opened = False
    try:
        async with _restored(slot.host, checkpoint, EndState.of(slot)) as copy:
            opened = True
            yield copy
        whole = True
    except Exception:
        whole = opened  # a checker that failed: what it was asked about may be worth another look
        raise
    finally:
        # Of a cancelled block, an error that the cancellation has brought about may be all that is seen here.
        if keep and not (whole and trio.current_effective_deadline() > -math.inf):
            with trio.CancelScope(shield=True):
                await in_thread(slot.host.services.store.discard_alone, checkpoint.manifest)


@asynccontextmanager
async def open_kept(host: Host, checkpoint: Checkpoint) -> AsyncIterator[Copy]:
    """Restore an end state for grading; at the end of the block nothing but the end state is left.

    The caller has waited for its turn (`Host.copy_limit`).

    Raises:
        CheckerError: the copy is not as it should be.
        CheckpointError: the checkpoint is no end state.
    """
    async with _restored(host, checkpoint, EndState.kept_in(checkpoint)) as copy:
        yield copy


@asynccontextmanager
async def _restored(host: Host, checkpoint: Checkpoint, state: EndState) -> AsyncIterator[Copy]:
    services = host.services
    with locked(checkpoint.path, shared=True):  # no host removes it meanwhile
        services.store.acquire(checkpoint)
        asked = services.config.limits
        # Room for CRIU, which works inside these limits: a desktop that is at its own can be copied all the same.
        limits = Limits(
            cpus=asked.cpus,
            memory_bytes=asked.memory_bytes + SPARE_MEMORY_BYTES,
            swap_bytes=asked.swap_bytes,
            pids=min(asked.pids + SPARE_PIDS, 1 << 22),
        )
        desktop = Desktop(services, f"c-{uuid.uuid4().hex[:12]}", limits)
        copy = Copy(host, state.slot, desktop, checkpoint, state.acted, CopyRecord(state.episode))
        host.copies[desktop.slot] = copy
        try:
            try:
                image = await trio.to_thread.run_sync(host.image_of, checkpoint)
                await desktop.start_from(checkpoint, image.layer, copy.episode)
            except (DesktopError, CheckpointError, OSError) as e:
                raise CheckerError(
                    f"the copy that was to be graded could not be restored: {e}", cause=Cause.INFRASTRUCTURE
                ) from e
            copy._require_judged()
            yield copy
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(services.store.release, checkpoint)
                del host.copies[desktop.slot]
                try:
                    await desktop.stop()
                except DesktopError:
                    # The grade stands; the next host clears what is left.
                    _log.exception("a graded copy could not be removed whole", slot=state.slot)


def _cause_of_refusal(slot: Slot, error: DumpError) -> tuple[Cause, list[str]]:
    """Who is behind a dump that failed, with what shows it: the programs in the desktop, or a lack of room on the host.

    Nothing limits a desktop's files, so one can take the room of all. What lacks room is its own doing where it would
    have it without the files that it has written. Blocks.
    """
    desktop = slot.desktop
    if not slot.has_acted or error.facts.get("interrupted") or desktop is None:
        return Cause.INFRASTRUCTURE, []
    written = _bytes_below(desktop.folder / UPPER)
    space = os.statvfs(desktop.folder)
    free, memory = space.f_bavail * space.f_frsize, desktop.cgroup.memory_in_use()
    if free >= memory + written:
        return Cause.AGENT, []
    seen = f"the host has {free >> 20} MiB left for a copy; the desktop has written {written >> 20} MiB of files"
    return (Cause.AGENT if free + written >= memory else Cause.INFRASTRUCTURE), [seen]


def _bytes_below(folder: Path) -> int:
    """What the files in a folder take on disk; one that goes meanwhile takes nothing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total
