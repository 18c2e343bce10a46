"""`open_host`: everything that drums does on one machine, for trio programs; the daemon only translates it."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import structlog
import trio

import drums
from drums.errors import (
    CapacityExhausted,
    CheckpointError,
    ConfigError,
    DesktopError,
    ImageUnsuitable,
    PrerequisiteError,
    SlotNotFound,
    TaskNotFound,
    TaskUnsupported,
)
from drums_core.abc import Catalogue, Checker, PackagedChecker, Pinned, PinningChecker, ServingChecker
from drums_core.boot import OPEN_FILES
from drums_core.checkpoint import Checkpoint, CheckpointStore, HostFacts, Manifest
from drums_core.config import HostConfig, load_config
from drums_core.copies import Copy
from drums_core.criu_provider import find_criu
from drums_core.durable import take_lock
from drums_core.end_states import KIND, sweep
from drums_core.end_states import remove as remove_end_state
from drums_core.episode import Episode
from drums_core.events import EventBus, HostEvent
from drums_core.evidence.processes import is_running, read_processes
from drums_core.gating import GateSet
from drums_core.golden import ensure_golden
from drums_core.image.recipe import known_recipes
from drums_core.image.software import images_with, recipe_with
from drums_core.image.store import Image, ImageStore
from drums_core.journal import ALIVE, Journal, JournalError, open_journal
from drums_core.leftovers import (
    clear_checkpoints,
    clear_slots,
    clear_worker_cgroups,
    namespaces_of_strangers,
)
from drums_core.logs import ensure_logging
from drums_core.model import (
    OWN_LABEL,
    DesktopEvent,
    Json,
    PluginId,
    PluginRecord,
    Purpose,
    Quarantined,
    Reward,
    Task,
    Validity,
    check_labels,
)
from drums_core.plugins import Plugins, build_manager, installed_now
from drums_core.reverifying import Reverification, reverify
from drums_core.services import Interposer, Services
from drums_core.setup import parse_steps
from drums_core.slot import Slot
from drums_core.sys.cgroups import remove_parent
from drums_core.sys.conntrack import load_conntrack
from drums_core.sys.devices import mount_devices, mount_scratch
from drums_core.sys.removal import remove_tree, unmount_below
from drums_core.sys.userns import open_idmap
from drums_core.verifying import Failure, checker_for
from drums_core.watcher import ProcessWatcher

_log = structlog.get_logger("drums.host")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FLUSH_LIMIT_S = 30.0
_CHANGED = "its files differ from those that the daemon began with: restart it to use them"
_NO_IMAGE = (
    "none that ships with drums; the setting `software` of the host adds a vendor's package to one "
    "(docs/install.md#software-that-debian-does-not-have)"
)
_ADDED = "installed since the daemon began: restart it to use it"
UNSET: Any = object()  # a ttl that was not given: the host's default


@attrs.define(eq=False)
class Host:
    """One open host. Made by `open_host`."""

    services: Services
    plugins: Plugins
    images: ImageStore
    nursery: trio.Nursery
    checkers: Mapping[str, tuple[Checker, PluginId]]
    catalogues: Sequence[Catalogue]
    journal: Journal
    _bus: EventBus
    slots: dict[str, Slot] = attrs.field(factory=dict)
    copies: dict[str, Copy] = attrs.field(factory=dict)  # being graded, by their desktops' names
    copy_limit: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))
    _image_locks: dict[str, int] = attrs.field(factory=dict)
    _golden_lock: trio.Lock = attrs.field(factory=trio.Lock)

    @property
    def config(self) -> HostConfig:
        """Its configuration."""
        return self.services.config

    # --- tasks

    def tasks(self) -> list[Task]:
        """All tasks of all catalogues."""
        return [task for catalogue in self.catalogues for task in catalogue.tasks()]

    def broken_tasks(self) -> dict[str, str]:
        """Task files that cannot be served, with the reason; complete once `tasks` was called."""
        found: dict[str, str] = {}
        for catalogue in self.catalogues:
            found |= {str(path): reason for path, reason in getattr(catalogue, "broken", {}).items()}
        return found

    def task(self, prefix: str) -> Task:
        """The task with this id or unique prefix.

        Raises:
            TaskNotFound: no catalogue has it.
        """
        problem: TaskNotFound | None = None
        for catalogue in self.catalogues:
            try:
                return catalogue.find(prefix)
            except TaskNotFound as e:
                problem = e
        raise problem or TaskNotFound(f"no task {prefix!r}: no catalogue is installed")

    def _check_task(self, task: Task) -> None:
        if not task.supported:
            raise TaskUnsupported(f"task {task.id!r} is not supported: {task.unsupported_reason}", task=task.id)
        parse_steps(self.plugins.registry, task.config, "config")
        _, checker, _ = checker_for(self.checkers, task)
        checker.validate(task)

    def pin(self, task: Task | None) -> Pinned | None:
        """What will score a task, as it is now; None where that cannot change. Blocks.

        Raises:
            VerifierNotFound: it is gone.
        """
        if task is None:
            return None
        _, checker, _ = checker_for(self.checkers, task)
        if not isinstance(checker, PinningChecker):
            return None
        return checker.pin(task, self.services.dev.parent / "pinned")

    def _check_image(self, task: Task, image: str) -> None:
        """Refuse a task that cannot be done in desktops of this image.

        Raises:
            ImageUnsuitable: it lacks an application (`.missing`), or the task is about the live web.
        """
        if image in known_recipes():  # one that an operator made is known to have what he put in it
            missing = sorted({*task.applications} - {*recipe_with(image, self.config.software).applications})
            if missing:
                suitable = images_with(task.applications, self.config.software)
                raise ImageUnsuitable(
                    f"task {task.id!r} needs {', '.join(missing)}, which image {image!r} lacks",
                    hint=f"images that have it: {', '.join(suitable) or _NO_IMAGE}",
                    image=image,
                    task=task.id,
                    missing=missing,
                    suitable=suitable,
                )
        if task.needs_web:
            raise ImageUnsuitable(
                f"task {task.id!r} is about live web pages, and desktops of image {image!r} have no network",
                hint='no drums desktop has a network to the outside yet (network="none"), whatever its image: '
                "choose a task with `needs_web` false",
                image=image,
                task=task.id,
                missing=["network"],
            )

    # --- plugins

    def plugin_records(self, *, anew: bool = False) -> list[PluginRecord]:
        """Every entry point: those loaded when the host opened, and what checkers find themselves, as of now. Blocks.

        Args:
            anew: let the checkers load what they find again, changed or not.
        """
        now = {(r.group, r.name, r.distribution): r for r in installed_now()}
        found = []
        for record in self.plugins.records:
            current = now.pop((record.group, record.name, record.distribution), None)
            changed = current is None or (current.version, current.sha256) != (record.version, record.sha256)
            note = _CHANGED if changed and record.distribution != "embedded" else ""
            found.append(attrs.evolve(record, note=note))
        found += [attrs.evolve(record, error=_ADDED) for record in now.values()]
        for checker, _ in self.checkers.values():
            if isinstance(checker, PackagedChecker):
                found += checker.installed(anew=anew)
        if anew:
            for record in found:
                if record.error or record.note:
                    _log.warning(
                        "plugin reloaded with a remark",
                        plugin=record.name,
                        distribution=record.distribution,
                        remark=record.error or record.note,
                    )
        return found

    # --- desktops

    async def create(
        self,
        task: str | Task | None = None,
        *,
        image: str | None = None,
        checkpoint: str | None = None,
        ttl_s: float | None = UNSET,
        labels: Mapping[str, str] | None = None,
        purpose: Purpose | None = None,
        on_slot: Callable[[Slot], None] | None = None,
    ) -> Slot:
        """A new desktop, judged, with its task set up.

        Args:
            task: a task, its id or a unique prefix of it.
            image: the image to start from; the host's default otherwise.
            checkpoint: a saved checkpoint to start from; without `task` its task and set-up state come along.
            ttl_s: seconds that it lives; None is for ever, where the host allows it.
            labels: texts by name that the journal keeps with the slot's episodes and its children's (`check_labels`).
            purpose: what drums itself makes it for, kept as the label `OWN_LABEL`; statistics leave such episodes out.
            on_slot: told of the slot as soon as there is one, before its desktop; its events can be followed.

        Raises:
            TaskNotFound, TaskUnsupported, ImageUnsuitable, VerifierNotFound, ConfigError, ImageNotFound,
            CheckpointError: refused, nothing starts.
            CapacityExhausted: as many desktops as the host may have.
            SetupFailed, RestoreError, GuestError: nothing is left.

        Cancellation: nothing is left.
        """
        if image is not None and checkpoint is not None:
            raise ConfigError(
                "image and checkpoint exclude each other: a checkpoint has its image", path="$.checkpoint"
            )
        ttl = self.lease(ttl_s)
        named = check_labels(labels or {}) | ({} if purpose is None else {OWN_LABEL: purpose})
        resolved = self.task(task) if isinstance(task, str) else task
        if resolved is not None:
            self._check_task(resolved)
            if checkpoint is None:
                self._check_image(resolved, image or self.config.image)
        if len(self.slots) >= self.config.max_slots:
            self.reserve(1, base=None, task=None, setup_at_reset=False, ttl_s=None)  # refuses
        base = await self._base(image, checkpoint)
        if resolved is not None and checkpoint is not None:
            self._check_image(resolved, base.manifest.image)
        own_setup = resolved is not None
        if resolved is None and checkpoint is not None:
            resolved = base.task()
        (slot,) = self.reserve(1, base=base, task=resolved, setup_at_reset=own_setup, ttl_s=ttl)
        slot.labels = named
        if on_slot is not None:
            on_slot(slot)
        try:
            await slot.begin(base, "create", setup=own_setup)
        except BaseException:
            with trio.CancelScope(shield=True):
                await slot.close(reason="the create failed")
            raise
        return slot

    def lease(self, ttl_s: float | None) -> float | None:
        """How long a desktop lives that is asked to live so long.

        Raises:
            ConfigError: this host does not allow it.
        """
        if ttl_s is UNSET:
            return self.config.default_ttl_s
        if ttl_s is None:
            if not self.config.allow_unlimited_ttl:
                raise ConfigError("this host does not allow an unlimited ttl", path="$.ttl")
            return None
        if not ttl_s > 0:
            raise ConfigError(f"ttl is {ttl_s!r}, it must be more than 0 seconds", path="$.ttl")
        return float(ttl_s)

    async def _base(self, image: str | None, checkpoint: str | None) -> Checkpoint:
        if checkpoint is not None:
            found = await trio.to_thread.run_sync(self.services.store.load, checkpoint)
            if found.manifest.kind == KIND:
                raise CheckpointError(
                    f"checkpoint {checkpoint!r} is an episode's end state, valid or not: no desktop starts from it",
                    hint="save() keeps a desktop to start from",
                    checkpoint=checkpoint,
                )
            return found
        return await self.golden(image or self.config.image)

    async def golden(self, image: str) -> Checkpoint:
        """An image's golden checkpoint, made if need be."""
        built = await trio.to_thread.run_sync(self.images.load, image)
        if not await trio.to_thread.run_sync(self.images.is_current, built):
            raise ImageUnsuitable(
                f"image {image!r} was built by another version of drums ({built.drums}), or for another setting "
                "`software`",
                hint=f"build it anew: drums image build {image}",
                image=image,
            )
        self._use_image(image)
        async with self._golden_lock:
            # And one host at a time: two would each make one.
            lock = await trio.to_thread.run_sync(lambda: take_lock(built.path, wait=True))
            try:
                return await ensure_golden(self.services, built)
            finally:
                os.close(lock)

    def _use_image(self, name: str) -> None:
        if name not in self._image_locks:
            self._image_locks[name] = self.images.use(name)

    def unlock_images(self) -> None:
        """Let go of the images."""
        while self._image_locks:
            os.close(self._image_locks.popitem()[1])

    def image_of(self, checkpoint: Checkpoint) -> Image:
        """The image below a checkpoint. Blocks.

        Raises:
            CheckpointError: the image has been built anew since.
        """
        manifest = checkpoint.manifest
        image = self.images.load(manifest.image)
        if image.digest != manifest.image_digest:
            raise CheckpointError(
                f"checkpoint {manifest.id!r} stands on image {manifest.image!r} with digest "
                f"{manifest.image_digest[:12]}, this host's has {image.digest[:12]}",
                checkpoint=manifest.id,
            )
        self._use_image(manifest.image)
        return image

    def reserve(
        self, count: int, *, base: Checkpoint | None, task: Task | None, setup_at_reset: bool, ttl_s: float | None
    ) -> list[Slot]:
        """Take `count` slots, or none.

        Raises:
            CapacityExhausted: there are not that many.
        """
        free = self.config.max_slots - len(self.slots)
        if count > free or base is None:
            raise CapacityExhausted(
                f"{count} desktops asked for, {max(free, 0)} of {self.config.max_slots} slots are free",
                hint="close desktops, or raise max_slots",
                wanted=count,
                free=free,
                allowed=self.config.max_slots,
            )
        slots = []
        for _ in range(count):
            slot = Slot(self, base, task, setup_at_reset, ttl_s)
            self.slots[slot.id] = slot
            slots.append(slot)
        return slots

    def slot(self, identity: str) -> Slot:
        """The slot with this id.

        Raises:
            SlotNotFound: there is none, or it is closed.
        """
        try:
            return self.slots[identity]
        except KeyError:
            raise SlotNotFound(f"no slot {identity!r}", slot=identity) from None

    def forget(self, slot: Slot) -> None:
        """A slot closed."""
        self.slots.pop(slot.id, None)

    # --- checkpoints

    def checkpoints(self) -> list[Manifest]:
        """The saved and golden checkpoints, and kept end states. Blocks."""
        return [m for m in self.services.store.names() if m.kind != "fork"]

    def check_new_name(self, name: str) -> None:
        """Refuse a name for a checkpoint that is malformed or taken. Blocks."""
        if not _NAME.fullmatch(name):
            raise CheckpointError(
                f"{name!r} is no name for a checkpoint",
                hint="1 to 64 letters, digits, dots, dashes and underscores",
                checkpoint=name,
            )
        if any(m.name == name or m.id == name for m in self.services.store.names()):
            raise CheckpointError(
                f"a checkpoint named {name!r} is already there", hint="delete it first", checkpoint=name
            )

    async def delete_checkpoint(self, name: str) -> None:
        """Remove a saved checkpoint, or an end state.

        Raises:
            CheckpointError: there is none, or it is in use.
        """
        found = [m for m in self.checkpoints() if name in (m.name, m.id)]
        if not found:
            raise CheckpointError(f"no checkpoint {name!r}", checkpoint=name)
        used = [m.name or m.id for m in self.services.store.names() if m.id != found[0].id and found[0].id in m.layers]
        if used:
            raise CheckpointError(f"checkpoint {name!r} is what {used} stand on", checkpoint=name)
        if found[0].kind == KIND:
            await trio.to_thread.run_sync(remove_end_state, self.services.store, found[0])
        else:
            await trio.to_thread.run_sync(self.services.store.discard, found[0].id)

    async def discard_unused(self, identity: str) -> None:
        """Remove a checkpoint unless another one stands on it."""
        manifests = await trio.to_thread.run_sync(self.services.store.names)
        if not any(m.id != identity and identity in m.layers for m in manifests):
            await trio.to_thread.run_sync(self.services.store.discard, identity)

    # --- episodes and events

    def new_episode(self, slot: Slot, origin: str, checkpoint: Checkpoint) -> Episode:
        """Begin an episode, from this checkpoint."""
        episode = Episode(
            slot=slot.id,
            origin=origin,
            required=self.services.gates.required,
            on_change=self._on_verdict,
            task=slot.task.id if slot.task else None,
            labels=slot.labels,
        )
        manifest = checkpoint.manifest
        self.journal.episode_started(
            episode,
            task_sha256=slot.task.sha256 if slot.task else None,
            image=(manifest.image, manifest.image_digest),
            base=checkpoint.id,
        )
        self.publish("episode_started", slot.id, {"origin": origin}, episode.id)
        self._observe("drums_episode_started", slot=slot.id, episode=episode.id, origin=origin)
        return episode

    def end_episode(self, episode: Episode) -> None:
        """End an episode; twice is once."""
        if not episode.closed:
            episode.closed = True
            self.journal.episode_ended(episode)

    def _on_verdict(self, episode: Episode, validity: Validity) -> None:
        self.journal.judged(episode, validity)
        data: dict[str, Json] = {"verdict": validity.verdict.value, "bad_gates": list(validity.bad_gates)}
        data |= {"reasons": list(validity.invalid_reasons), "causes": [c.value for c in validity.causes]}
        self.publish("verdict", episode.slot, data, episode.id)
        self._observe("drums_episode_judged", slot=episode.slot, episode=episode.id, validity=validity)

    def _observe(self, hook: str, **facts: Any) -> None:
        for implementation in getattr(self.plugins.manager.hook, hook).get_hookimpls():
            try:
                implementation.function(**{name: facts[name] for name in implementation.argnames})
            except Exception:  # noqa: BLE001 - an observer decides nothing, and costs nobody else
                _log.exception("an observer failed", hook=hook, plugin=implementation.plugin_name)

    def publish(self, kind: str, slot: str, data: Json, episode: str = "") -> None:
        """Tell the subscribers of `events`."""
        self._bus.publish(HostEvent(kind, slot, episode, data))

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[HostEvent]]:
        """Everything that happens from now on, as an async iterator."""
        async with self._bus.subscribe() as iterator:
            yield iterator

    def on_desktop_event(self, slot: str, event: DesktopEvent) -> None:
        """An event of one desktop: from the watcher, or a quarantine."""
        if slot in self.copies:
            self.copies[slot].on_event(event)  # its end, not that of the episode
            return
        self.publish("desktop_event", slot, {"event": type(event).__name__, **attrs.asdict(event)})
        if slot not in self.slots:
            return
        if isinstance(event, Quarantined):
            self.journal.quarantined(self.slots[slot].episode, event.reason, event.by_user)
        self.slots[slot].on_event(event)

    # --- rewards

    def _steps_of(self, task: Task) -> dict[str, Json]:
        """Which plugin provides each type of step that a task uses, before its check as well."""
        listed = task.evaluator.get("postconfig")
        after = [x.get("type") for x in listed if isinstance(x, dict)] if isinstance(listed, list) else []
        steps = self.plugins.registry.steps
        used = sorted({*(x.type for x in task.config), *(x for x in after if isinstance(x, str))} & set(steps))
        return {name: attrs.asdict(steps[name][1]) for name in used}

    def graders(self, task: Task, pinned: Pinned | None) -> dict[str, Json]:
        """What scores a task, with its versions, as a reward's provenance has it: `checker`, `steps`, `drums`."""
        name, checker, plugin = checker_for(self.checkers, task)
        facts = pinned.facts if pinned else checker.provenance(task)
        return {
            "checker": {"name": name, "plugin": attrs.asdict(plugin), **facts},
            "steps": self._steps_of(task),
            "drums": drums.__version__,
        }

    async def reverify(self, episode: str, *, anyway: bool = False) -> Reverification:
        """Grade the kept end state of an episode again and compare: `drums_core.reverifying.reverify`."""
        return await reverify(self, episode, anyway=anyway)

    def make_reward(
        self,
        slot: Slot,
        *,
        score: float | None,
        failure: Failure | None = None,
        checker_skipped: str | None = None,
        provenance: Mapping[str, Json] | None = None,
    ) -> Reward:
        """The reward of a slot's current episode as of now."""
        task = slot.task
        assert task is not None
        validity = slot.episode.validity
        return Reward(
            score=score,
            valid=validity.valid,
            invalid_reasons=validity.invalid_reasons,
            verdict=validity.verdict,
            bad_gates=validity.bad_gates,
            checker_error=failure.message if failure else None,
            checker_error_cause=(failure.cause or "unknown") if failure else None,
            checker_skipped=checker_skipped,
            provenance={
                "episode": slot.episode.id,
                "origin": slot.episode.origin,
                "labels": dict(slot.episode.labels),
                "task": task.id,
                "task_sha256": task.sha256,
                "image": slot.base.manifest.image,
                "image_digest": slot.base.manifest.image_digest,
                "checkpoint": slot.base.id,
                "criu": self.services.criu.version,
                **self.graders(task, slot.episode.pinned),
                "gates": [attrs.asdict(p) for p in self.services.gates.plugin_ids()],
                "causes": [c.value for c in validity.causes],
                "notes": list(slot.episode.notes),
                **(provenance or {}),
            },
        )


@asynccontextmanager
async def open_host(
    config: HostConfig | None = None,
    *,
    plugins: Plugins | None = None,
    interposer: Interposer | None = None,
) -> AsyncIterator[Host]:
    """Open this machine as a host of desktops.

    Args:
        config: None reads the configuration of this machine (`load_config`).
        plugins: None finds the installed ones.
        interposer: called at the points of each desktop's life; fault injection hangs here.

    Raises:
        PrerequisiteError: the machine lacks something; the text says what mends it.
        PluginError: a required gate cannot be loaded.

    At the end of the block every desktop is closed and nothing is left: no process, mount, namespace, cgroup or file.
    """
    ensure_logging()
    config = config or load_config()
    if os.geteuid() != 0:
        raise PrerequisiteError(f"desktops need root on the host, this is uid {os.geteuid()}", hint="run it with sudo")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES[1]:
        raise PrerequisiteError(
            f"the hard limit of open files is {hard}, at least {OPEN_FILES[1]} is needed by desktops",
            hint=f"ulimit -Hn {OPEN_FILES[1]}, or LimitNOFILE= in the service's unit",
        )
    found = plugins or build_manager()
    for record in found.broken():
        _log.error("plugin not in use", plugin=record.name, distribution=record.distribution, error=record.error)
    found.require_gates(config.extra_required_gates)
    async with AsyncExitStack() as stack:
        slots: dict[str, Slot] = {}
        copies: dict[str, Copy] = {}
        services = await _open_services(stack, config, found, interposer, slots, copies)
        images = ImageStore(config.state_dir / "images", config.software)
        checkers = {name: (factory(config), owner) for name, (factory, owner) in found.registry.checkers.items()}
        catalogues = [factory(config) for factory, _ in found.registry.catalogues.values()]
        journal = await trio.to_thread.run_sync(open_journal, config.state_dir, services.instance)
        stack.callback(journal.close)
        problem: BaseException | None = None
        # What is recorded while the desktops close must still be written, so that a cancellation from outside, which
        # ends the nursery's other tasks, does not end this one.
        writing = trio.CancelScope(shield=True)

        async def write_journal() -> None:
            with writing:
                await journal.run()

        async with trio.open_nursery() as nursery:
            host = Host(services, found, images, nursery, checkers, catalogues, journal, EventBus(), slots, copies)
            host.copy_limit.total_tokens = config.max_copies
            nursery.start_soon(services.watcher.run)
            nursery.start_soon(sweep, services.store, config)
            nursery.start_soon(write_journal)
            for name, (checker, _) in checkers.items():
                if isinstance(checker, ServingChecker):
                    nursery.start_soon(_serve, name, checker)
            try:
                yield host
            except BaseException as e:  # noqa: BLE001 - raised again below
                # The nursery would wrap the caller's own error in a group.
                problem = e
            finally:
                try:
                    with trio.CancelScope(shield=True):
                        await _close_slots(host)
                        # What is left is tried again as the journal closes; a failure is logged.
                        with suppress(JournalError), trio.move_on_after(FLUSH_LIMIT_S):
                            await journal.flush()
                finally:
                    host.unlock_images()
                    writing.cancel()
                    nursery.cancel_scope.cancel()
        if problem is not None:
            raise problem


async def _serve(name: str, checker: ServingChecker) -> None:
    try:
        await checker.serve()
    except Exception:  # noqa: BLE001 - of foreign code, which checks without it all the same
        _log.exception("what a checker does while the host is open ended early", checker=name)


async def _close_slots(host: Host) -> None:
    async with trio.open_nursery() as nursery:
        for slot in list(host.slots.values()):
            nursery.start_soon(_close_slot, slot)


async def _close_slot(slot: Slot) -> None:
    try:
        await slot.close(reason="the host closed")
    except DesktopError:
        # The others are closed all the same; what is left is cleared by the next host that opens.
        _log.exception("a desktop could not be removed whole", slot=slot.id)


async def _open_services(
    stack: AsyncExitStack,
    config: HostConfig,
    plugins: Plugins,
    interposer: Interposer | None,
    slots: dict[str, Slot],
    copies: dict[str, Copy],
) -> Services:
    """Open what the host's desktops share; everything is released by `stack`, in reverse."""
    instance = f"h-{uuid.uuid4().hex[:12]}"
    state = config.state_dir
    # A desktop's root is nobody on the host and must reach its own root file system and /dev, so the folders above
    # them may be passed through. They cannot be listed, and what lies in them has random names.
    try:
        for name, mode in (("slots", 0o711), ("checkpoints", 0o700), ("images", 0o700)):
            (state / name).mkdir(parents=True, exist_ok=True, mode=mode)
            (state / name).chmod(mode)
    except OSError as e:
        raise PrerequisiteError(
            f"the state folder {str(state)!r} cannot be used: {e}", hint="name another one with DRUMS_STATE_DIR"
        ) from e
    runtime = state / "run" / instance
    runtime.mkdir(parents=True, mode=0o711)
    stack.callback(_remove_runtime, runtime)
    me = read_processes([os.getpid()])[0]
    (runtime / "owner").write_text(f"{me.host_pid} {me.start_ticks}")
    stack.callback(os.close, take_lock(runtime / ALIVE))
    criu = await trio.to_thread.run_sync(find_criu, state)
    await trio.to_thread.run_sync(load_conntrack)
    store = CheckpointStore(state / "checkpoints", HostFacts.of_this_host(criu))
    stack.callback(os.close, await trio.to_thread.run_sync(_enter_state, state, store))
    await trio.to_thread.run_sync(mount_devices, runtime / "dev")
    await trio.to_thread.run_sync(mount_scratch, runtime / "kdat")
    idmap_fd = await open_idmap()
    stack.callback(os.close, idmap_fd)
    stack.callback(remove_parent)

    def on_event(slot: str, event: DesktopEvent) -> None:
        if (place := slots.get(slot) or copies.get(slot)) is not None:
            place.host.on_desktop_event(slot, event)

    def acted(slot: str) -> bool:
        place = slots.get(slot) or copies.get(slot)
        return place is not None and place.has_acted

    def on_kill(slot: str) -> None:
        if (place := slots.get(slot) or copies.get(slot)) is not None:
            place.check_oom()

    def namespaces_of_others(slot: str) -> Mapping[str, Mapping[str, int]]:
        # One that is still being rebuilt has none yet; it looks at this one in its turn.
        found = {s.id: s.desktop.namespaces for s in slots.values() if s.id != slot and s.desktop}
        found |= namespaces_of_strangers(state / "slots", {slot, *slots})
        return {identity: namespaces for identity, namespaces in found.items() if namespaces}

    watcher = ProcessWatcher(on_event, acted, on_kill)
    watcher.open()
    stack.callback(watcher.close)
    return Services(
        config=config,
        instance=instance,
        slots_dir=state / "slots",
        dev=runtime / "dev",
        kdat_dir=runtime / "kdat",
        idmap_fd=idmap_fd,
        criu=criu,
        store=store,
        gates=GateSet.build(
            plugins.registry, timeout_s=config.gate_timeout_s, extra_required=config.extra_required_gates
        ),
        watcher=watcher,
        namespaces_of_others=namespaces_of_others,
        interposer=interposer,
    )


def _enter_state(state: Path, store: CheckpointStore) -> int:
    """Clear leftovers, alone if nobody else is open, and hold the state folder's lock, shared, from then on."""
    clear_slots(state / "slots")
    lock_file = state / "host.lock"
    try:
        alone = take_lock(lock_file)
    except BlockingIOError:
        return take_lock(lock_file, shared=True, wait=True)
    try:
        images = ImageStore(state / "images")
        golden = [images.load(name).golden_id() for name in images.names()]
        clear_checkpoints(store, [identity for identity in golden if identity is not None])
        clear_worker_cgroups()
        _clear_runtime(state / "run")
        # flock(2) converts in place; nobody can be shared and exclusive at once in between.
        fcntl.flock(alone, fcntl.LOCK_SH)
    except BaseException:
        os.close(alone)
        raise
    return alone


def _clear_runtime(runtime: Path) -> None:
    """Remove what hosts that ended without their clean-up mounted; their desktops are gone already."""
    for folder in runtime.glob("h-*"):
        owner = folder / "owner"
        try:
            pid, start = (int(x) for x in owner.read_text().split())
        except (OSError, ValueError):
            continue
        if not is_running(pid, start):
            _remove_runtime(folder)


def _remove_runtime(runtime: Path) -> None:
    unmount_below(runtime)
    remove_tree(runtime)
