"""A desktop with a real application, open files, locks of every kind, odd files and threads, to be copied by forks."""

from __future__ import annotations

from pathlib import Path

import trio

from drums.errors import GuestError
from drums_core.as_user import execute_as_user, upload_as_user
from drums_core.host import Host
from drums_core.model import Task
from drums_core.services import Interposition
from drums_core.slot import Slot
from drums_core.testing.faults import Fault, Point
from drums_core.testing.faults.model import PLANT

_PROGRAM = Path(__file__).with_name("stage_program.py")
_AT = "/tmp/drums-stage.py"
_APPLICATION = "mousepad"
_WITHIN_S = 60.0
_MOUNTS = [
    Fault("stage", (), Point.UP, "mounts of the stage", "mount_tmpfs", PLANT / "mounts.py", arguments)
    for arguments in ({"where": "/mnt", "sizes_k": [64, 128]}, {"where": "/srv", "read_only": True})
]


def as_interposition(slot: Slot, point: str) -> Interposition:
    """A slot's living desktop, as an interposer is told of it."""
    desktop = slot.desktop
    if desktop is None:
        raise GuestError(f"slot {slot.id} has no desktop")
    return Interposition(point, slot.id, desktop.pid1, desktop.root, tuple(desktop.cgroup.paths))


async def set_the_stage(host: Host, task: Task | None = None, *, application: bool = True) -> Slot:
    """Such a desktop. What it runs is the harness's, not an agent's.

    Args:
        task: what it and its copies are verified with; None where none of them is.
        application: whether the application is among it, which makes copies slower.

    Raises:
        GuestError: the program, or the application's window, did not come up.
        FaultNotPlanted: the mounts could not be made.
    """
    slot = await host.create(task, purpose="selftest")
    try:
        for mounts in _MOUNTS:
            await mounts.plant(as_interposition(slot, Point.UP))
        await upload_as_user(slot.guest, _AT, _PROGRAM.read_bytes())
        await shell(slot, f"setsid python3 {_AT} hold </dev/null >/tmp/drums-stage.log 2>&1 &")
        await _until(slot, "test -e /tmp/drums-stage.ready", "cat /tmp/drums-stage.log")
        if not application:
            return slot
        await shell(slot, f"setsid {_APPLICATION} ~/stage/plain </dev/null >/tmp/drums-application.log 2>&1 &")
        await _until(slot, "wmctrl -l | grep -q plain", "cat /tmp/drums-application.log")
    except BaseException:
        with trio.CancelScope(shield=True):
            await slot.close(reason="the stage could not be set")
        raise
    return slot


async def shell(slot: Slot, script: str) -> int:
    """A shell script as the desktop's user, that is no action of an agent's; its exit code."""
    return (await execute_as_user(slot.guest, "/execute", script, shell=True, timeout_s=_WITHIN_S)).returncode


async def _until(slot: Slot, condition: str, otherwise: str) -> None:
    with trio.move_on_after(_WITHIN_S):
        while await shell(slot, condition):  # noqa: ASYNC110 - the desktop tells nobody
            await trio.sleep(0.1)
        return
    said = await execute_as_user(slot.guest, "/execute", otherwise, shell=True, timeout_s=10.0)
    raise GuestError(f"the stage did not come up within {_WITHIN_S:g} s ({condition!r}): {said.output[-500:]}")
