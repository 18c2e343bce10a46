"""What a fault is, and how one is made."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

if TYPE_CHECKING:
    from drums_core.services import Interposition

PLANT = Path(__file__).parents[1] / "plant"
"""The folder with the actions of drums' own faults."""

_TIMEOUT_S = 60.0
_NOT_HERE = 77  # as in plant/main.py


class FaultNotPlanted(RuntimeError):
    """The fault could not be made; what was to be tried has not been tried."""


class NotOnThisHost(FaultNotPlanted):
    """This host has no such thing, so there is nothing to try."""


class By(enum.StrEnum):
    """Who makes a fault."""

    HOST = "host"  # a process on the host
    AGENT = "agent"  # a command of the agent's
    USER = "user"  # who drives the desktop: a quarantine


class Need(enum.StrEnum):
    """What a fault wants besides a desktop."""

    OTHER = "another desktop"
    STAGE = "a staged desktop"  # a copy of one with an application, locks, odd files and threads: `selftest.stage`
    TIGHT = "a tight host"  # little memory, and little time for the guest server


class Point(enum.StrEnum):
    """When in a desktop's life a fault is made. The first seven are those of `Interposition.point`."""

    FROZEN = "frozen"
    REBUILT = "rebuilt"
    RESTORED = "restored"
    PRE_RESUME = "pre_resume"
    RESUMED = "resumed"
    READY = "ready"
    SETTLED = "settled"
    UP = "up"  # it has been handed out; its verdict is pending
    VALID = "valid"  # its verdict is valid
    VERIFY = "verify"  # while it is verified: as the checker looks


@attrs.frozen
class Fault:
    """One fault; or, without gates, an act that no gate may take for one.

    Args:
        name: names it; the name of a gate, or that and a variant (`netns:route`).
        gates: the gates that have to fail, all others have to pass.
        point: when it is made.
        about: what it is, in words.
        action: the function of `file` that makes it; or the agent's command; or the reason of a quarantine.
        file: the Python file with the action: its function is called with a `plant.target.Target` and the arguments, in
            a process of its own that has the standard library and the folder `drums_core/testing/plant`.
        arguments: that function's arguments.
        cause: the cause that the failed gates have to name.
        needs: what it wants besides a desktop.
        by: who makes it.
        says: words that the first gate's reason has to hold.
        other_gates: the gates that have to fail in the other desktop, where there is one.
    """

    name: str
    gates: tuple[str, ...]
    point: Point
    about: str
    action: str
    file: Path = PLANT
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    cause: str = "infrastructure"
    needs: frozenset[Need] = frozenset()
    by: By = By.HOST
    says: tuple[str, ...] = ()
    other_gates: tuple[str, ...] = ()

    @property
    def harmless(self) -> bool:
        """Whether it is an act that no gate may take for a fault."""
        return not self.gates

    async def plant(self, at: Interposition, *, other_pid1: int = 0, other_cgroups: tuple[Path, ...] = ()) -> None:
        """Make the fault in this desktop; returns once it is there, or, where it comes later, under way.

        Args:
            at: the desktop, at the fault's point.
            other_pid1: host pid of another desktop's init, for faults that mix two desktops up.
            other_cgroups: that desktop's cgroup directories.

        Raises:
            NotOnThisHost: this host has no such thing.
            FaultNotPlanted: it could not be made.
        """
        request = {
            "action": self.action,
            "file": str(self.file),
            "arguments": dict(self.arguments),
            "target": {
                "pid1": at.pid1,
                "root": str(at.root),
                "cgroups": [str(x) for x in at.cgroup_paths],
                "other_pid1": other_pid1,
                "other_cgroups": [str(x) for x in other_cgroups],
                "asked_at": time.monotonic(),
            },
        }
        done: subprocess.CompletedProcess[bytes] | None = None
        with trio.move_on_after(_TIMEOUT_S):
            done = await trio.run_process(
                [sys.executable, "-I", "-S", str(PLANT / "main.py"), json.dumps(request)],
                check=False,
                capture_stdout=True,
                stderr=subprocess.STDOUT,
            )
        if done is None:
            raise FaultNotPlanted(f"fault {self.name!r} was not made within {_TIMEOUT_S:g} s")
        said = (done.stdout or b"").decode(errors="replace").strip()
        if done.returncode == _NOT_HERE:
            raise NotOnThisHost(f"fault {self.name!r} cannot be made on this host: {said[-1000:]}")
        if done.returncode:
            raise FaultNotPlanted(f"fault {self.name!r} could not be made: {said[-1000:] or done.returncode}")
