"""One living desktop: restored (or booted), judged while it is held, dumped, and torn down.

A `Desktop` is one tree of processes with its files, cgroup and namespaces. A slot has one at a time; a reset
replaces it. Resources are released in the reverse order of how they were taken, by `stop`, whatever happened.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import structlog
import trio

from drums.errors import DesktopError, GuestError, RestoreError
from drums_core.abc import DesktopView
from drums_core.boot import INIT_ARGV, boot
from drums_core.checkpoint import UPPER, Checkpoint
from drums_core.dumping import dump_desktop
from drums_core.durable import locked, take_lock, write_json
from drums_core.evidence.event_sources import read_event_sources
from drums_core.evidence.processes import (
    namespace_inodes,
    processes_in_pidns,
    read_processes,
    read_stat,
    read_uid,
)
from drums_core.guest_client import GuestClient
from drums_core.model import GateResult, Json, Limits, Phase, ProcessIdentity
from drums_core.provisioning import Provisioner
from drums_core.services import Interposition, Services
from drums_core.sys.cgroups import Cgroup, create_cgroup
from drums_core.sys.criu import hold_restore
from drums_core.sys.file_locks import reapply_locks
from drums_core.sys.inside import open_namespace
from drums_core.sys.overlay import Layer, mount_overlay
from drums_core.sys.removal import open_beneath, remove_tree, unmount_below
from drums_core.sys.timers import restart_timers
from drums_core.sys.userns import FIRST_ID

_log = structlog.get_logger("drums.desktop")
HOME = "home/user"
USER_UID = 1000
SECRET_FILE = "run/drums-guest/secret"
STOP_DEADLINE_S = 30.0


class Judged(Protocol):
    """What the results of gates are added to: an episode, or the copy of a desktop that is graded."""

    def add(self, results: Sequence[GateResult]) -> None:
        """Add results."""


async def in_thread(work: Callable[..., object], *args: object) -> object:
    """Run blocking work in a thread; not abandoned on cancellation, because it changes the host."""
    return await trio.to_thread.run_sync(work, *args)


@attrs.define(eq=False)
class Desktop:
    """One tree of processes with its files, cgroup and namespaces.

    Args:
        services: what the host's parts share.
        slot: the slot's id; names its folder and cgroup.
        limits: what it may use.
    """

    services: Services
    slot: str
    limits: Limits
    pid1: int = 0
    pid1_start: int = 0
    guest: GuestClient | None = None
    namespaces: Mapping[str, int] = attrs.field(factory=dict)
    checkpoint: Checkpoint | None = None
    damaged: str = ""  # why its processes cannot be trusted any more
    ready_at: float = 0.0
    layers: Sequence[Layer] = ()
    restored: tuple[ProcessIdentity, ...] = ()
    event_sources: tuple[Json, ...] = ()
    session: tuple[ProcessIdentity, ...] = ()  # of these the parts of the session: display, buses, window manager
    _cgroup: Cgroup | None = None
    _oom_kills: int = 0
    _releases: list[tuple[str, Callable[[], Awaitable[None]]]] = attrs.field(factory=list)

    # --- places

    @property
    def folder(self) -> Path:
        """Its folder on the host."""
        return self.services.slots_dir / self.slot

    @property
    def root(self) -> Path:
        """Its file tree on the host."""
        return self.folder / "merged"

    @property
    def cgroup(self) -> Cgroup:
        """Its cgroup."""
        if self._cgroup is None:
            raise DesktopError(f"desktop {self.slot!r} has no cgroup: it is not started")
        return self._cgroup

    @property
    def provisioner(self) -> Provisioner:
        """Root's entrance from the host."""
        return Provisioner(self.pid1, self.cgroup)

    def view(self) -> DesktopView:
        """What gates may look at."""
        guest = self.guest
        assert guest is not None
        return DesktopView(
            slot=self.slot,
            pid1=self.pid1,
            root=self.root,
            home=HOME,
            cgroup=self.cgroup,
            limits=self.limits,
            namespaces=self.namespaces,
            others=self.services.namespaces_of_others(self.slot),
            init_argv=INIT_ARGV,
            restored=self.restored,
            guest=guest,
            ready_limit_s=self.services.config.ready_limit_s,
            event_sources=self.event_sources,
        )

    # --- starting

    async def _prepare(self, layers: Sequence[Layer], upper_like: Path | None) -> None:
        """Folder, layers and cgroup; each with its release."""
        self.layers = layers
        self._releases.append(("folder", self._remove_folder))
        await in_thread(self._make_folder, upper_like)
        self._releases.append(("cgroup", self._remove_cgroup))
        self._cgroup = create_cgroup(self.slot)
        self._cgroup.write_limits(self.limits, cpu=False)
        await in_thread(
            mount_overlay, self.root, layers, self.folder / UPPER, self.folder / "work", self.services.idmap_fd
        )
        if upper_like is not None:
            info = os.stat(upper_like)
            os.utime(self.root, ns=(info.st_atime_ns, info.st_mtime_ns))

    def _make_folder(self, upper_like: Path | None) -> None:
        # Held by this process for as long as the desktop lives: a folder whose lock is free is a leftover. Another
        # host that looks for leftovers must not look in between.
        with locked(self.services.slots_dir, shared=True, wait=True):
            self.folder.mkdir(mode=0o711)  # its own root passes through
            lock = take_lock(self.folder / "owner.lock")

        async def unlock() -> None:
            os.close(lock)

        self._releases.insert(0, ("lock", unlock))
        for name in (UPPER, "work", "merged", "log"):
            (self.folder / name).mkdir()
        for name in (UPPER, "work"):
            os.chown(self.folder / name, FIRST_ID, FIRST_ID)
        os.chmod(self.folder / UPPER, 0o755)
        if upper_like is not None:
            info = os.stat(upper_like)
            os.chown(self.folder / UPPER, info.st_uid, info.st_gid)
            os.chmod(self.folder / UPPER, info.st_mode & 0o7777)

    def _adopt_pid1(self, pid: int) -> None:
        self.pid1 = pid
        self.pid1_start = read_processes([pid])[0].start_ticks if read_processes([pid]) else 0
        write_json(self.folder / "slot.json", {"slot": self.slot, "pid1": pid, "start": self.pid1_start})

    def _connect(self) -> None:
        """Namespaces by descriptor, and a secret of its own."""
        netns = open_namespace(self.pid1, "net")

        async def close_netns() -> None:
            os.close(netns)

        self._releases.append(("network namespace", close_netns))
        self.namespaces = namespace_inodes(self.pid1)
        self.guest = GuestClient(netns, secrets.token_hex(32))

    def _write_secret(self) -> None:
        """Overwrite the guest server's secret in place; no file is created through the desktop's root."""
        assert self.guest is not None
        root = os.open(f"/proc/{self.pid1}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = open_beneath(root, SECRET_FILE, os.O_WRONLY)
        finally:
            os.close(root)
        try:
            os.pwrite(fd, self.guest.secret.encode(), 0)
        finally:
            os.close(fd)

    def strangers(self) -> list[int]:
        """Host pids of the user's processes that are no part of the session: what a frozen copy leaves frozen."""
        session = {p.host_pid for p in self.session}
        found = []
        for pid in sorted(self.cgroup.pids() - session):
            with contextlib.suppress(OSError):
                if read_uid(pid) == FIRST_ID + USER_UID:
                    found.append(pid)
        return found

    def new_oom_kills(self) -> int | None:
        """How many processes the out-of-memory killer has taken so far, if more than at the last look; else None."""
        try:
            kills = self.cgroup.oom_kills()
        except (OSError, DesktopError):
            return None  # it is being torn down
        if kills <= self._oom_kills:
            return None
        self._oom_kills = kills
        return kills

    async def interpose(self, point: str) -> None:
        """Let fault injection have its turn at a point of the desktop's life."""
        if self.services.interposer is not None:
            await self.services.interposer(
                Interposition(point, self.slot, self.pid1, self.root, tuple(self.cgroup.paths))
            )

    async def start_from(self, checkpoint: Checkpoint, image_layer: Layer, judged: Judged) -> None:
        """Restore a checkpoint, judge it while it is held, let it go, and wait until it is ready.

        Gates that fail do not raise: `judged` gets their results.

        Raises:
            RestoreError: CRIU, or drums' own repair of lost locks, failed.
            CheckpointError, OSError: something could not be made.

        Cancellation: the caller calls `stop`, which leaves nothing behind.
        """
        services = self.services
        self.checkpoint = checkpoint
        services.store.acquire(checkpoint)
        self._releases.append(("checkpoint", self._release_checkpoint))
        upper_like = services.store.path / checkpoint.manifest.layers[0] / UPPER
        await self._prepare([*services.store.layers(checkpoint), image_layer], upper_like)
        evidence = await trio.to_thread.run_sync(checkpoint.evidence)
        self._releases.append(("processes", self._kill))

        async def at_post_restore() -> None:
            self._connect()
            await self.interpose("rebuilt")
            await self._put_locks_back(checkpoint.images)
            await self.interpose("restored")
            judged.add(await services.gates.check(Phase.RESTORED, self.view(), evidence))

        async with hold_restore(
            services.criu,
            images=checkpoint.images,
            work=self.folder / "log",
            root=self.root,
            dev=services.dev,
            cgroup_paths=self.cgroup.paths,
            kdat_dir=services.kdat_dir,
            timeout_s=services.config.criu_timeout_s,
            on_pid1=self._adopt_pid1,
            at_post_restore=at_post_restore,
        ) as held:
            # CRIU sits in the desktop's cgroup; frozen with it, it could never finish. Frozen without it, the
            # desktop stays stopped even if CRIU dies.
            self.cgroup.evict(held.criu_pid)
            await in_thread(self.cgroup.freeze)
            self.cgroup.write_limits(self.limits)
            self._write_secret()
            inside = await trio.to_thread.run_sync(processes_in_pidns, self.namespaces["pid"])
            self.restored = tuple(await trio.to_thread.run_sync(read_processes, inside))
            self.session = tuple(_session(pid1=self.pid1, processes=self.restored))
            services.watcher.drain()
            services.watcher.track(self.slot, self.restored)
            await self._restart_timers()
            await self.interpose("pre_resume")
            await in_thread(self._read_event_sources)
            judged.add(await services.gates.check(Phase.PRE_RESUME, self.view(), evidence))
            await held.release()
        await in_thread(self.cgroup.thaw)
        await self.interpose("resumed")
        judged.add(await services.gates.check(Phase.READY, self.view(), evidence))
        self.ready_at = time.monotonic()
        await self.interpose("ready")

    async def _restart_timers(self) -> None:
        """CRIU stops periodic timers that have fired and were not read."""
        try:
            restarted = await trio.to_thread.run_sync(restart_timers, [p.host_pid for p in self.restored])
        except (OSError, ValueError) as e:
            raise RestoreError(f"timers that CRIU stops could not be started again: {e}") from e
        if restarted:
            _log.info("timers started again", slot=self.slot, count=len(restarted))

    def _read_event_sources(self) -> None:
        self.event_sources = tuple(read_event_sources([p.host_pid for p in self.restored], self.pid1))

    async def _put_locks_back(self, images: Path) -> None:
        """CRIU loses POSIX locks on files that their process has mapped; see docs/adr/0002-put-back-posix-locks.md."""
        pids = await trio.to_thread.run_sync(processes_in_pidns, self.namespaces["pid"])
        try:
            put_back = await trio.to_thread.run_sync(reapply_locks, images, pids)
        except (OSError, RuntimeError, ValueError) as e:
            raise RestoreError(f"locks that CRIU lost could not be put back: {e}") from e
        if put_back:
            _log.info("locks put back", slot=self.slot, count=len(put_back))

    async def settle(self, evidence: Mapping[str, Json]) -> list[GateResult]:
        """Wait out the settling time and judge what needs it."""
        await trio.sleep(max(0.0, self.ready_at + self.services.config.settle_s - time.monotonic()))
        await self.interpose("settled")
        self.services.watcher.drain()
        return await self.services.gates.check(Phase.SETTLED, self.view(), evidence)

    async def start_booted(self, image_layer: Layer, *, timeout_s: float = 120.0) -> None:
        """Boot an image; returns when the guest server answers.

        Raises:
            DesktopError: init could not be started, or nothing answered in time.
        """
        await self._prepare([image_layer], None)
        self._releases.append(("processes", self._kill))
        helper, pid = await boot(self.root, self.services.dev, self.cgroup)

        async def reap_helper() -> None:
            await helper.wait()

        # Init's parent ends when init does, so it is waited for after the kill, which is released first.
        self._releases.insert(len(self._releases) - 1, ("boot helper", reap_helper))
        self.cgroup.evict(helper.pid)  # it joined so that init was born there; refused where it has ended already
        self._adopt_pid1(pid)
        self._connect()
        self.cgroup.write_limits(self.limits)
        with trio.move_on_after(timeout_s) as scope:
            while True:
                try:
                    self._write_secret()
                    assert self.guest is not None
                    await self.guest.health()
                    return
                except (OSError, GuestError) as e:
                    problem = e
                await trio.sleep(0.05)
        assert scope.cancelled_caught
        raise DesktopError(f"the booted desktop's guest server did not answer within {timeout_s:g} s: {problem}")

    def evidence(self) -> dict[str, Json]:
        """The evidence of the checkpoint that it was restored from. Blocks."""
        return {} if self.checkpoint is None else self.checkpoint.evidence()

    def track_processes(self) -> None:
        """Follow processes that entered from the host and stayed; their forks were not seen from their start."""
        self.services.watcher.drain()
        self.services.watcher.track(self.slot, read_processes(sorted(self.cgroup.pids())))

    # --- dumping

    async def dump(self, **facts: Json) -> Checkpoint:
        """Freeze it, dump it with its evidence, and let it run on: `dumping.dump_desktop`.

        Args:
            facts: the manifest's fields that the desktop does not know (name, kind, image, task, …).

        Raises:
            DumpError: nothing is left of the attempt; `.interrupted` says that the desktop itself may be damaged.

        Cancellation: not in the middle (a killed CRIU can damage the source); the attempt is bounded in time, and
        thrown away afterwards.
        """
        return await dump_desktop(self, facts)

    # --- stopping

    async def stop(self) -> None:
        """Tear it down: no process, mount, namespace, cgroup or file is left. Twice is once.

        Raises:
            DesktopError: something could not be removed; what could be, was.
        """
        problems: list[str] = []
        with trio.CancelScope(shield=True, deadline=trio.current_time() + STOP_DEADLINE_S) as scope:
            self.services.watcher.untrack(self.slot)
            while self._releases:
                what, release = self._releases.pop()
                try:
                    await release()
                except OSError as e:
                    problems.append(f"{what}: {e}")
        if scope.cancelled_caught:
            problems.append(f"not done within {STOP_DEADLINE_S:g} s")
        if problems:
            raise DesktopError(f"desktop {self.slot!r} could not be removed whole: {'; '.join(problems)}")

    async def _kill(self) -> None:
        if self.pid1:
            # It is our own child, so its pid is nobody else's until it is reaped below.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid1, signal.SIGKILL)
        self.cgroup.kill()
        await in_thread(self.cgroup.thaw)
        while self.cgroup.pids():
            self.cgroup.kill()
            await trio.sleep(0.005)
        if self.pid1:
            await self._reap()

    async def _reap(self) -> None:
        while True:
            try:
                if os.waitpid(self.pid1, os.WNOHANG)[0]:  # noqa: ASYNC222 - WNOHANG does not block
                    return
            except ChildProcessError:
                return  # booted: the helper is its parent
            await trio.sleep(0.002)

    async def _remove_cgroup(self) -> None:
        while self._cgroup is not None and not self._cgroup.remove():  # noqa: ASYNC110 - as above
            await trio.sleep(0.005)
        self._cgroup = None

    async def _remove_folder(self) -> None:
        if not self.folder.exists():
            return
        await in_thread(unmount_below, self.folder)
        await in_thread(remove_tree, self.folder)

    async def _release_checkpoint(self) -> None:
        if self.checkpoint is not None:
            await in_thread(self.services.store.release, self.checkpoint)


def _session(pid1: int, processes: Sequence[ProcessIdentity]) -> Iterator[ProcessIdentity]:
    """The session's script, and its children, among a desktop's processes.

    By descent, which the agent cannot forge: the script is the user's only process with a parent that is root's and not
    pid 1, with whom orphans end up.
    """
    parents, users = {}, {}
    for process in processes:
        with contextlib.suppress(OSError):
            parents[process.host_pid] = read_stat(process.host_pid).parent
            users[process.host_pid] = read_uid(process.host_pid)
    roots = {pid for pid, uid in users.items() if uid == FIRST_ID and pid != pid1}
    user = FIRST_ID + USER_UID
    scripts = {pid for pid, parent in parents.items() if users.get(pid) == user and parent in roots}
    for process in processes:
        if process.host_pid in scripts or parents.get(process.host_pid) in scripts:
            yield process
