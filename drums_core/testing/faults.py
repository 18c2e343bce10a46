"""Real faults, planted in living desktops: what shows that a gate sees what it is there to see.

A fault is made in the kernel or on disk by a process of its own (`plant.py`) that knows no gate. Nothing here
touches evidence or gates, or imports them: a fault only *names* the gates that have to fail.

    faults = FaultInjector()
    async with open_host(config, interposer=faults) as host:
        faults.arm(fault("state_hash"))
        slot = await host.create()  # its episode turns invalid, and names state_hash
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

if TYPE_CHECKING:
    from drums_core.services import Interposition

_PLANT = Path(__file__).with_name("plant.py")
_PLANT_TIMEOUT_S = 60.0


class FaultNotPlanted(RuntimeError):
    """The fault could not be made; what was to be tried has not been tried."""


@attrs.frozen
class Fault:
    """One fault.

    Args:
        name: names it; the name of a gate, or that and a variant (`netns:route`).
        gates: the gates that have to fail, all others have to pass.
        point: where in a desktop's life it is made (`Interposition.point`).
        about: what it is, in words.
        action: the function of `plant.py` that makes it.
        arguments: that function's arguments.
        cause: the cause that the failed gates have to name.
        needs: what the desktop, or its host, must have for it; "" for nothing.
    """

    name: str
    gates: tuple[str, ...]
    point: str
    about: str
    action: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    cause: str = "infrastructure"
    needs: str = ""

    async def plant(self, at: Interposition, *, other_pid1: int = 0) -> None:
        """Make the fault in this desktop; returns once it is there, or, where it comes later, under way.

        Args:
            at: the desktop, at the fault's point.
            other_pid1: host pid of another desktop's init, for faults that mix two desktops up.

        Raises:
            FaultNotPlanted: it could not be made.
        """
        request = {
            "slot": at.slot,
            "pid1": at.pid1,
            "root": str(at.root),
            "cgroups": [str(x) for x in at.cgroup_paths],
            "other_pid1": other_pid1,
            "asked_at": time.monotonic(),
            "action": self.action,
            "arguments": dict(self.arguments),
        }
        done: subprocess.CompletedProcess[bytes] | None = None
        with trio.move_on_after(_PLANT_TIMEOUT_S):
            done = await trio.run_process(
                [sys.executable, "-I", "-S", str(_PLANT), json.dumps(request)],
                check=False,
                capture_stdout=True,
                stderr=subprocess.STDOUT,
            )
        if done is None:
            raise FaultNotPlanted(f"fault {self.name!r} was not made within {_PLANT_TIMEOUT_S:g} s")
        if done.returncode:
            said = (done.stdout or b"").decode(errors="replace").strip()
            raise FaultNotPlanted(f"fault {self.name!r} could not be made: {said[-1000:] or done.returncode}")


_BOTH_LOCKS = ("lock_applied", "lock_pre_resume")
_HOLDER = "a process that holds such a lock when the desktop is dumped"


def _lock_faults() -> list[Fault]:
    found = []
    for gate, gates, point in (
        ("lock_applied", _BOTH_LOCKS, "restored"),
        ("lock_pre_resume", ("lock_pre_resume",), "pre_resume"),
    ):
        found.append(
            Fault(gate, gates, point, "an open file of the desktop has a lock that it had not before", "add_lock")
        )
        for kind, how in (("FLOCK", "drop"), ("OFDLCK", "drop"), ("FLOCK", "weaken"), ("POSIX", "drop")):
            # Under a frozen cgroup no call can be made in a process's place, and a POSIX lock is only its own to drop.
            if (kind, point) != ("POSIX", "pre_resume"):
                variant = f"{gate}:{kind.lower()}-{'dropped' if how == 'drop' else 'weakened'}"
                about = f"a {kind} lock of the checkpoint is {'dropped' if how == 'drop' else 'made a shared one'}"
                arguments = {"kind": kind, "how": how}
                found.append(Fault(variant, gates, point, about, "change_lock", arguments, needs=_HOLDER))
    return found


def _isolation_faults() -> list[Fault]:
    every = ["mnt", "net", "ipc", "uts"]
    found = [
        Fault(
            "isolation",
            ("isolation",),
            "pre_resume",
            "a process of the desktop is in the host's mount, network, IPC and UTS namespaces",
            "share_namespaces",
            {"kinds": every, "with_other": False},
        )
    ]
    for kind in every:
        for with_other in (False, True):
            whose = "another desktop's" if with_other else "the host's"
            found.append(
                Fault(
                    f"isolation:{kind}{'-of-other' if with_other else ''}",
                    ("isolation",),
                    "pre_resume",
                    f"a process of the desktop is in {whose} {kind} namespace",
                    "share_namespaces",
                    {"kinds": [kind], "with_other": with_other},
                    needs="another desktop" if with_other else "",
                )
            )
    return found


def _death_fault(name: str, gate: str, about: str, command: str, sig: str, delay_s: float) -> Fault:
    arguments = {"command": command, "sig": sig, "delay_s": delay_s}
    return Fault(name, (gate,), "ready", about, "kill_later", arguments)


FAULTS: Mapping[str, Fault] = {
    x.name: x
    for x in [
        *_lock_faults(),
        Fault(
            "cgroup",
            ("cgroup",),
            "pre_resume",
            "the memory limit is one page off",
            "change_memory_limit",
            {"pages": -1},
        ),
        Fault(
            "cgroup:cpu", ("cgroup",), "pre_resume", "the CPU quota is a thousandth of a core off", "change_cpu_limit"
        ),
        Fault(
            "cgroup:moved-out",
            ("cgroup",),
            "pre_resume",
            "a process of the desktop is in another cgroup",
            "move_out",
            {"command": "openbox"},
        ),
        Fault(
            "cgroup:stranger",
            ("cgroup",),
            "pre_resume",
            "a stranger, in namespaces of its own, is in the desktop's cgroup",
            "move_in_stranger",
            {"unshare": ["pid", "mnt", "net", "ipc", "uts"]},
        ),
        Fault(
            "cgroup:host-process",
            ("cgroup", "isolation"),
            "pre_resume",
            "a process of the host, in the host's namespaces, is in the desktop's cgroup",
            "move_in_stranger",
            {"unshare": []},
        ),
        Fault(
            "init_identity",
            ("init_identity",),
            "pre_resume",
            "init has another argument in its memory",
            "change_init_argument",
        ),
        Fault(
            "mount_table", ("mount_table",), "pre_resume", "a tmpfs is mounted inside", "mount_tmpfs", {"where": "/mnt"}
        ),
        Fault(
            "mount_table:read-only",
            ("mount_table",),
            "pre_resume",
            "a mount inside is read-only",
            "remount_read_only",
            {"where": "/dev/shm"},
        ),
        *(
            Fault(
                "netns" if what == "address" else f"netns:{what}",
                ("netns",),
                "pre_resume",
                f"the network inside has {about}",
                "change_network",
                {"what": what},
            )
            for what, about in (
                ("address", "one more address"),
                ("route", "one more route"),
                ("rule", "one more rule"),
                ("table", "one more nftables table"),
                ("mtu", "another MTU on the loopback"),
            )
        ),
        Fault(
            "guest_ready",
            ("guest_ready",),
            "resumed",
            "the guest server is stopped",
            "stop_guest_server",
            needs="a host with a short ready_limit_s, to be quick",
        ),
        *(
            Fault(
                "state_hash" if how == "append" else f"state_hash:{how}",
                ("state_hash",),
                "pre_resume",
                about,
                "change_home",
                {"how": how},
            )
            for how, about in (
                ("append", "a file of the home is one byte longer"),
                ("flip", "one bit of a file of the home is another, its times are the same"),
                ("owner", "a file of the home belongs to somebody else"),
                ("add", "the home has one more file"),
            )
        ),
        *_isolation_faults(),
        _death_fault(
            "alive_after_resume",
            "alive_after_resume",
            "the window manager is killed a second after the desktop answered",
            "openbox",
            "SIGKILL",
            1.0,
        ),
        _death_fault(
            "alive_after_resume:late",
            "alive_after_resume",
            "a message bus is killed 4.5 s after the desktop answered",
            "dbus-daemon",
            "SIGKILL",
            4.5,
        ),
        Fault(
            "no_oom_kill",
            ("no_oom_kill",),
            "ready",
            "the desktop's memory is full, and the kernel kills a process in its cgroup",
            "fill_memory",
        ),
        _death_fault(
            "no_app_crash",
            "no_app_crash",
            "the window manager dies of a segmentation fault a second after the episode was found valid",
            "openbox",
            "SIGSEGV",
            6.0,
        ),
    ]
}
"""Every fault by name. Each checked gate, `no_oom_kill` and `no_app_crash` name one of them."""


def fault(name: str) -> Fault:
    """The fault with this name: that of a gate gives the plainest fault that this gate sees.

    Raises:
        LookupError: there is none.
    """
    try:
        return FAULTS[name]
    except KeyError:
        raise LookupError(f"no fault {name!r}; there are {', '.join(FAULTS)}") from None


@attrs.define(eq=False)
class Armed:
    """A fault that is to be planted once.

    Args:
        fault: the fault.
        slot: the desktop that gets it; "" until one has taken it.
        other_pid1: host pid of another desktop's init, for faults that mix two desktops up.
        planted: whether it has been made.
    """

    fault: Fault
    slot: str = ""
    other_pid1: int = 0
    planted: bool = False


@attrs.define(eq=False)
class FaultInjector:
    """An interposer that plants what is armed, once each, and else does nothing.

    Desktops that start side by side do not take each other's faults: one that is armed for "the next desktop" is
    for the next that the *arming task*, or a task that it starts, restores. One desktop takes one such fault.
    """

    armed: list[Armed] = attrs.field(factory=list)
    _mine: ContextVar[Sequence[Armed]] = attrs.field(factory=lambda: ContextVar("drums_faults", default=()))

    def arm(self, fault: Fault, *, slot: str = "", other_pid1: int = 0) -> Armed:
        """Let a fault be planted at its point, in this slot's desktop or in the next one."""
        armed = Armed(fault, slot, other_pid1)
        self.armed.append(armed)
        if not slot:
            self._mine.set((*self._mine.get(), armed))
        return armed

    async def __call__(self, at: Interposition) -> None:
        """Called by the host at each point of each desktop's life."""
        if at.point in ("frozen", "rebuilt"):  # of a dump, and of a restore
            dumping = at.point == "frozen"
            free = [x for x in self._mine.get() if not x.slot and (x.fault.point == "frozen") is dumping]
            if free:
                free[0].slot = at.slot
        for armed in self.armed:
            if armed.slot == at.slot and armed.fault.point == at.point and not armed.planted:
                armed.planted = True
                await armed.fault.plant(at, other_pid1=armed.other_pid1)
