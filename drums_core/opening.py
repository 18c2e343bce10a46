"""`open_host`: opening this machine as a host of desktops, and leaving nothing when it closes."""

from __future__ import annotations

import fcntl
import os
import resource
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import structlog
import trio

from drums.errors import DesktopError, PrerequisiteError
from drums_core.abc import PackagedChecker, ServingChecker
from drums_core.boot import OPEN_FILES
from drums_core.checkpoint import CheckpointStore, HostFacts
from drums_core.config import HostConfig, load_config
from drums_core.copies import Copy
from drums_core.criu_provider import find_criu
from drums_core.durable import take_lock
from drums_core.end_states import sweep
from drums_core.events import EventBus
from drums_core.evidence.processes import is_running, read_processes
from drums_core.gating import GateSet
from drums_core.host import Host
from drums_core.image.store import ImageStore
from drums_core.journal import ALIVE, open_journal
from drums_core.journal_file import JournalError
from drums_core.leftovers import clear_checkpoints, clear_slots, clear_worker_cgroups, namespaces_of_strangers
from drums_core.logs import ensure_logging
from drums_core.model import DesktopEvent, PluginRecord
from drums_core.plugins import Plugins, build_manager
from drums_core.services import Interposer, Services
from drums_core.slot import Slot
from drums_core.sys.cgroups import remove_parent
from drums_core.sys.conntrack import load_conntrack
from drums_core.sys.devices import mount_devices, mount_scratch
from drums_core.sys.removal import remove_tree, unmount_below
from drums_core.sys.userns import open_idmap
from drums_core.watcher import ProcessWatcher

_log = structlog.get_logger("drums.host")
FLUSH_LIMIT_S = 30.0


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
    _tell(found.broken())
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
                if isinstance(checker, PackagedChecker):
                    nursery.start_soon(_tell_packages, name, checker)
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


def _tell(broken: Iterable[PluginRecord]) -> None:
    for record in broken:
        _log.error("plugin not in use", plugin=record.name, distribution=record.distribution, error=record.error)


async def _tell_packages(name: str, checker: PackagedChecker) -> None:
    """Log what is broken of what a checker finds itself. It loads each, for which the opening does not wait.

    Not abandoned when the host closes, so that no process is left that loads one: that takes 30 s where one hangs.
    """
    try:
        records = await trio.to_thread.run_sync(checker.installed)
    except Exception:  # noqa: BLE001 - of foreign code; who asks for the plugins is told again
        _log.exception("a checker does not say what it has", checker=name)
    else:
        _tell(record for record in records if not record.ok)


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
