"""What the parts of one open host share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import attrs

from drums_core.checkpoint import CheckpointStore
from drums_core.config import HostConfig
from drums_core.criu_provider import Criu
from drums_core.gating import GateSet
from drums_core.watcher import ProcessWatcher


@attrs.frozen
class Interposition:
    """What an interposer is told: the kernel's names for one desktop, and nothing of the gates.

    Args:
        point: `frozen` (dumped, evidence about to be recorded), `rebuilt` (CRIU has rebuilt it, drums' own repairs are
            to come), `restored` (about to be judged), `pre_resume` (held and frozen, about to be judged), `resumed`
            (running, about to be asked), `ready`, `settled` (about to be judged).
        slot: the slot's id.
        pid1: host pid of its init.
        root: its file tree on the host.
        cgroup_paths: its cgroup directories.
    """

    point: str
    slot: str
    pid1: int
    root: Path
    cgroup_paths: tuple[Path, ...]


Interposer = Callable[[Interposition], Awaitable[None]]
"""Called at the points of a desktop's life; fault injection hangs here. Production has none."""


@attrs.frozen
class Services:
    """Made by `open_host`, handed to every desktop.

    Args:
        instance: id of this open host.
        slots_dir: folders of the desktops.
        dev: the shared, read-only `/dev`.
        kdat_dir: tmpfs folder for CRIU's cache.
        idmap_fd: user namespace that id-maps image layers.
        namespaces_of_others: namespaces of every desktop but the named slot's.
    """

    config: HostConfig
    instance: str
    slots_dir: Path
    dev: Path
    kdat_dir: Path
    idmap_fd: int
    criu: Criu
    store: CheckpointStore
    gates: GateSet
    watcher: ProcessWatcher
    namespaces_of_others: Callable[[str], Mapping[str, Mapping[str, int]]]
    interposer: Interposer | None
