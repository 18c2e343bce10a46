"""`Host`: everything that drums does on one machine, for trio programs; the daemon only translates it."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import structlog
import trio

from drums.errors import (
    CapacityExhausted,
    CheckpointError,
    ConfigError,
    ImageUnsuitable,
    SlotNotFound,
    TaskNotFound,
)
from drums_core.abc import Catalogue, Checker, PackagedChecker, Pinned, PinningChecker, PreparingChecker
from drums_core.checkpoint import Checkpoint, Manifest
from drums_core.config import HostConfig
from drums_core.copies import Copy
from drums_core.durable import take_lock
from drums_core.end_states import KIND
from drums_core.end_states import remove as remove_end_state
from drums_core.episode import Episode
from drums_core.events import EventBus, HostEvent
from drums_core.golden import ensure_golden
from drums_core.image.store import Image, ImageStore
from drums_core.journal import Journal
from drums_core.model import (
    OWN_LABEL,
    DesktopEvent,
    Json,
    PluginId,
    PluginRecord,
    Purpose,
    Quarantined,
    Task,
    Validity,
    check_labels,
)
from drums_core.plugins import Plugins, installed_now
from drums_core.reverifying import Reverification, reverify
from drums_core.services import Services
from drums_core.slot import Slot
from drums_core.task_needs import checker_for, require_image, require_supported

_log = structlog.get_logger("drums.host")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CHANGED = "its files differ from those that the daemon began with: restart it to use them"
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
            require_supported(resolved, self.plugins.registry, self.checkers)
            if checkpoint is None:
                require_image(resolved, image or self.config.image, self.config.software)
        if len(self.slots) >= self.config.max_slots:
            self.reserve(1, base=None, task=None, setup_at_reset=False, ttl_s=None)  # refuses
        base = await self._base(image, checkpoint)
        if resolved is not None and checkpoint is not None:
            require_image(resolved, base.manifest.image, self.config.software)
        own_setup = resolved is not None
        if resolved is None and checkpoint is not None:
            resolved = base.task()
        checker = None if resolved is None else checker_for(self.checkers, resolved)[1]
        if resolved is not None and isinstance(checker, PreparingChecker):
            await checker.prepare(resolved)
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

    async def reverify(self, episode: str, *, anyway: bool = False) -> Reverification:
        """Grade the kept end state of an episode again and compare: `drums_core.reverifying.reverify`."""
        return await reverify(self, episode, anyway=anyway)
