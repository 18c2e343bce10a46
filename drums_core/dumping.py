"""Dumping a desktop: frozen, its evidence recorded, its images and file layer put in the store; then it runs on.

What CRIU refuses is tried again, where that is safe. What may have damaged the desktop is noted in `Desktop.damaged`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from drums.errors import DumpError
from drums_core.boot import INIT_ARGV
from drums_core.checkpoint import UPPER, Checkpoint
from drums_core.durable import write_json
from drums_core.evidence.processes import descends_from, read_processes
from drums_core.model import Json
from drums_core.sys.criu import dump
from drums_core.sys.removal import remove_tree

if TYPE_CHECKING:
    from drums_core.desktop import Desktop

_log = structlog.get_logger("drums.desktop")
DUMP_DEADLINE_S = 120.0
DUMP_TRIES, DUMP_PAUSE_S = 5, 0.2  # the pause doubles
_INOTIFY_LOST = "error parsing [inotify"


async def dump_desktop(desktop: Desktop, facts: Mapping[str, Json]) -> Checkpoint:
    """A checkpoint of a desktop as it is; see `Desktop.dump`.

    Raises:
        DumpError: nothing is left of the attempt.
    """
    with trio.CancelScope(shield=True, deadline=trio.current_time() + DUMP_DEADLINE_S) as scope:
        return await _dump_retrying(desktop, facts)
    assert scope.cancelled_caught
    desktop.damaged = f"a dump did not end within {DUMP_DEADLINE_S:g} s"
    raise DumpError(f"dump of desktop {desktop.slot!r} did not end within {DUMP_DEADLINE_S:g} s", interrupted=True)


async def _dump_retrying(desktop: Desktop, facts: Mapping[str, Json]) -> Checkpoint:
    began = trio.current_time()
    for number in range(DUMP_TRIES - 1):
        try:
            return await _dump_once(desktop, facts)
        except DumpError as e:
            refusal = str(e.facts.get("log_excerpt", ""))
            if e.facts.get("interrupted") or not refusal:  # not CRIU's word, or no second dump is safe
                raise
            if trio.current_time() - began > DUMP_DEADLINE_S / 3:  # one that the deadline broke off would do damage
                raise
            _log.info("a dump is tried again", slot=desktop.slot, error=e.message)
        if _INOTIFY_LOST in refusal:
            # Memory pressure evicted the directory entry of a watched path, and its handle with it. Looking every
            # path up brings the entries back (docs/adr/0001-hold-restores.md).
            await trio.to_thread.run_sync(_look_up_everything, desktop.root)
        else:
            # A process that was just ending makes CRIU refuse (kcmp, EBADF), and so do descriptors on their way
            # between processes ("Control messages in queue"), as they are for a while where an application starts.
            await trio.sleep(DUMP_PAUSE_S * 2**number)
    return await _dump_once(desktop, facts)


async def _dump_once(desktop: Desktop, facts: Mapping[str, Json]) -> Checkpoint:
    services = desktop.services
    store = services.store
    outsiders = await trio.to_thread.run_sync(_outsiders, desktop)
    if outsiders:
        raise DumpError(
            f"desktop {desktop.slot!r} has processes that do not descend from its init and would be lost: {outsiders}",
            interrupted=False,
        )
    try:
        identity, folder = store.begin()
    except OSError as e:
        raise DumpError(f"dump of desktop {desktop.slot!r} failed: {e}", interrupted=False) from e
    try:

        async def while_frozen() -> None:
            await desktop.interpose("frozen")
            evidence = await services.gates.record(desktop.view())
            write_json(folder / "evidence.json", evidence)
            await _copy_upper(desktop, folder / UPPER)

        try:
            await dump(
                services.criu,
                pid=desktop.pid1,
                images=folder / "criu",
                root=desktop.root,
                kdat_dir=services.kdat_dir,
                timeout_s=services.config.criu_timeout_s,
                while_frozen=while_frozen,
            )
        except DumpError as e:
            if e.facts.get("interrupted"):
                desktop.damaged = f"a dump broke off: {e.message}"
            raise
        layers = [identity, *(desktop.checkpoint.manifest.layers if desktop.checkpoint else ())]
        fields = {"base": identity, "init_argv": INIT_ARGV, "layers": tuple(layers), **facts}
        return await trio.to_thread.run_sync(lambda: store.finish(folder, **fields))
    except BaseException as e:
        with trio.CancelScope(shield=True):  # from the dump's own deadline
            await trio.to_thread.run_sync(remove_tree, folder)
        if isinstance(e, OSError):
            raise DumpError(f"dump of desktop {desktop.slot!r} failed: {e}", interrupted=bool(desktop.damaged)) from e
        raise


def _outsiders(desktop: Desktop) -> list[str]:
    pids = desktop.cgroup.pids()
    inside = descends_from(desktop.pid1, sorted(pids))
    return [f"{p.command!r} ({p.inner_pid})" for p in read_processes(sorted(pids - set(inside)))]


async def _copy_upper(desktop: Desktop, target: Path) -> None:
    # cp knows whiteouts, opaque folders' xattrs, holes and hard links; a hard-linked copy would follow its source.
    done = await trio.run_process(
        ["cp", "-a", "--preserve=all", "--reflink=auto", str(desktop.folder / UPPER), str(target)],
        check=False,
        capture_stderr=True,
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
    )
    if done.returncode:
        problem = (done.stderr or b"").decode(errors="replace")
        raise DumpError(
            f"the file layer of desktop {desktop.slot!r} could not be copied: {problem.strip()[-500:]}",
            interrupted=False,
        )


def _look_up_everything(root: Path) -> None:
    for folder, _, files in os.walk(root, followlinks=False):
        for name in files:
            try:
                os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
