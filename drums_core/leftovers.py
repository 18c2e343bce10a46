"""Clearing what a host that ended without its clean-up left: desktops, mounts, cgroups, half-made checkpoints.

Identity is by lock, never by guess: a desktop's folder is a leftover only when nobody holds its `owner.lock`.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Container, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
import trio

from drums_core.checkpoint import MANIFEST, CheckpointStore
from drums_core.durable import locked, take_lock
from drums_core.evidence.processes import is_running, namespace_inodes, read_processes
from drums_core.model import Limits
from drums_core.sys.cgroups import Cgroup, cgroup_names, create_cgroup, existing_cgroup
from drums_core.sys.removal import remove_tree, unmount_below

_log = structlog.get_logger("drums.leftovers")
KILL_LIMIT_S = 10.0
WORKER_PREFIX = "w-"  # of the cgroups of checks
CGROUP_LIMIT_S = 10.0


def clear_slots(slots_dir: Path) -> list[str]:
    """Tear down every desktop that nobody owns; the slots' ids. Blocks."""
    # Held shared while a desktop's folder is made and its owner's lock taken.
    with locked(slots_dir, wait=True):
        return _clear_slots(slots_dir)


def _clear_slots(slots_dir: Path) -> list[str]:
    cleared = []
    for folder in sorted(slots_dir.iterdir()) if slots_dir.is_dir() else []:
        try:
            lock = take_lock(folder / "owner.lock")
        except BlockingIOError:
            continue  # its owner lives
        except FileNotFoundError:
            continue
        try:
            _clear_slot(folder)
        finally:
            os.close(lock)
        cleared.append(folder.name)
        _log.warning("removed a leftover desktop", slot=folder.name)
    return cleared


def _clear_slot(folder: Path) -> None:
    try:
        record = json.loads((folder / "slot.json").read_bytes())
        if is_running(int(record["pid1"]), int(record["start"])):
            os.kill(int(record["pid1"]), signal.SIGKILL)
    except (OSError, ValueError, KeyError):
        pass  # no init was recorded: the cgroup below still finds what there is
    cgroup = existing_cgroup(folder.name)
    deadline = time.monotonic() + KILL_LIMIT_S
    while cgroup is not None and not cgroup.remove():
        if cgroup.pids():
            cgroup.kill()
            cgroup.thaw()
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of the leftover desktop {folder.name!r} do not end")
        time.sleep(0.01)
    unmount_below(folder)
    remove_tree(folder)


def namespaces_of_strangers(slots_dir: Path, known: Container[str]) -> dict[str, dict[str, int]]:
    """The namespaces of desktops of other hosts that are open on the same state folder, by slot id."""
    found = {}
    for folder in slots_dir.iterdir():
        if folder.name in known:
            continue
        try:
            record = json.loads((folder / "slot.json").read_bytes())
            if is_running(int(record["pid1"]), int(record["start"])):
                found[folder.name] = namespace_inodes(int(record["pid1"]))
        except (OSError, ValueError, KeyError):
            continue  # it is being made, or being removed
    return found


def worker_cgroup_name() -> str:
    """A new name for a check's cgroup; it tells whose it is, since all hosts of a machine share the cgroup tree."""
    me = read_processes([os.getpid()])[0]
    return f"{WORKER_PREFIX}{me.host_pid}-{me.start_ticks}-{uuid.uuid4().hex[:8]}"


@asynccontextmanager
async def temporary_cgroup(limits: Limits) -> AsyncIterator[Cgroup]:
    """A cgroup for what a check runs; what is left in it at the end is killed."""
    cgroup = create_cgroup(worker_cgroup_name())
    try:
        cgroup.write_limits(limits)
        yield cgroup
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CGROUP_LIMIT_S):
            while not cgroup.remove():
                cgroup.kill()
                await trio.sleep(0.005)


def clear_worker_cgroups() -> None:
    """Remove the cgroups of checks whose host ended; their workers ended with it."""
    for name in cgroup_names():
        parts = name.split("-")
        if not name.startswith(WORKER_PREFIX) or len(parts) != 4 or is_running(int(parts[1]), int(parts[2])):
            continue
        cgroup = existing_cgroup(name)
        if cgroup is not None and not cgroup.pids():
            cgroup.remove()


def clear_checkpoints(store: CheckpointStore, golden: Iterable[str]) -> list[str]:
    """Remove half-made checkpoints, and forks' and replaced golden ones that no saved one builds on; their ids. Blocks.

    Only while no other host is open on the same state folder. A manifest that this version cannot read is somebody's
    saved work, and stays.

    Args:
        golden: the golden checkpoints in use.
    """
    kinds: dict[str, str] = {}
    needed = set(golden)
    for folder in sorted(store.path.iterdir()) if store.path.is_dir() else []:
        try:
            document = json.loads((folder / MANIFEST).read_bytes())
        except FileNotFoundError:
            kinds[folder.name] = "half-made"
            continue
        except (OSError, ValueError):
            continue
        if isinstance(document, dict):
            kinds[folder.name] = str(document.get("kind"))
            if document.get("kind") not in ("fork", "golden"):
                needed.update(str(layer) for layer in document.get("layers", ()))
    gone = {"half-made"}
    unneeded = {"fork", "golden"}
    removed = [i for i, kind in kinds.items() if kind in gone or (kind in unneeded and i not in needed)]
    for identity in removed:
        store.discard(identity)
    return removed
