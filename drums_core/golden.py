"""The golden checkpoint of an image: booted, quiet, dumped. Every desktop of the image begins with it."""

from __future__ import annotations

import hashlib
import uuid

import structlog
import trio

from drums.errors import CheckpointError, DesktopError
from drums_core.checkpoint import Checkpoint
from drums_core.desktop import Desktop
from drums_core.image.store import Image
from drums_core.services import Services

_log = structlog.get_logger("drums.golden")
_READY_FILE = "/run/user/1000/session-ready"
BOOT_LIMIT_S = 120.0
QUIET_LIMIT_S = 60.0
QUIET_SAMPLES = 4
SAMPLE_INTERVAL_S = 0.5
QUIET_CPU_FRACTION = 0.02
# A service that is started on demand ends after 10 s of idleness, as GLib's applications do: in a copy it would be
# missed, and the copy be judged broken.
SAME_PROCESSES_S = 12.0


def _cpu_seconds(desktop: Desktop) -> float:
    """CPU time of all processes of a desktop so far."""
    import psutil

    total = 0.0
    for pid in desktop.cgroup.pids():
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


async def wait_until_quiet(desktop: Desktop) -> None:
    """Wait until the session is up, its screen no longer changes, and its processes rest and are the same for a while.

    Raises:
        DesktopError: it does not come to rest in time.
    """
    guest = desktop.guest
    assert guest is not None
    with trio.move_on_after(BOOT_LIMIT_S) as scope:
        while True:
            reply = await guest.call("POST", "/execute", {"command": ["test", "-e", _READY_FILE]})
            if reply.json().get("returncode") == 0:
                break
            await trio.sleep(0.1)
    if scope.cancelled_caught:
        raise DesktopError(f"the session was not up within {BOOT_LIMIT_S:g} s after the guest server")
    with trio.move_on_after(QUIET_LIMIT_S) as scope:
        screen, calm = "", 0
        used, since = _cpu_seconds(desktop), trio.current_time()
        processes, unchanged_since = desktop.cgroup.pids(), since
        while calm < QUIET_SAMPLES or since - unchanged_since < SAME_PROCESSES_S:
            await trio.sleep(SAMPLE_INTERVAL_S)
            if (found := desktop.cgroup.pids()) != processes:
                processes, unchanged_since = found, trio.current_time()
            # Sampled before the screenshot, which itself costs CPU time.
            now, at = _cpu_seconds(desktop), trio.current_time()
            fraction = (now - used) / (at - since)
            shot = hashlib.sha256((await guest.call("GET", "/screenshot")).body).hexdigest()
            calm = calm + 1 if shot == screen and fraction < QUIET_CPU_FRACTION else 0
            screen, used, since = shot, _cpu_seconds(desktop), trio.current_time()
    if scope.cancelled_caught:
        raise DesktopError(f"the desktop did not come to rest within {QUIET_LIMIT_S:g} s")


async def make_golden(services: Services, image: Image) -> Checkpoint:
    """Boot an image, wait until it is quiet, dump it, and record the checkpoint as the image's golden one."""
    desktop = Desktop(services, f"d-{uuid.uuid4().hex[:12]}", services.config.limits)
    try:
        await desktop.start_booted(image.layer, timeout_s=BOOT_LIMIT_S)
        await wait_until_quiet(desktop)
        checkpoint = await desktop.dump(
            name=f"golden-{image.name}", kind="golden", image=image.name, image_digest=image.digest, task=None
        )
    finally:
        await desktop.stop()
    await trio.to_thread.run_sync(image.set_golden, checkpoint.id)
    return checkpoint


async def ensure_golden(services: Services, image: Image) -> Checkpoint:
    """The image's golden checkpoint; made anew when there is none, or when this host cannot use it any more."""
    identity = image.golden_id()
    if identity is not None:
        try:
            checkpoint = await trio.to_thread.run_sync(services.store.load, identity)
            evidence = await trio.to_thread.run_sync(checkpoint.evidence)
            # A gate that was installed since would fail every desktop that starts from it.
            unknown = sorted(services.gates.recording - set(evidence))
            if checkpoint.manifest.image_digest != image.digest:
                problem = "it belongs to an older build of the image"
            elif unknown:
                problem = f"it holds no evidence of {', '.join(unknown)}"
            else:
                return checkpoint
        except CheckpointError as e:
            problem = e.message
        _log.warning("making the golden checkpoint anew", image=image.name, reason=problem)
    return await make_golden(services, image)
