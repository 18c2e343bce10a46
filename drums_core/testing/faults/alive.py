"""Restored processes that do not live for the 5 s, or wait for what will not come.

They are dead at once, late, replaced, without their last thread; their timer no longer fires, their display is out of
reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drums_core.testing.faults.model import PLANT, Fault, Need, Point

_GATE = "alive_after_resume"


def _fault(
    name: str, about: str, point: Point, action: str, arguments: Mapping[str, Any], *says: str, staged: bool = False
) -> Fault:
    needs = frozenset({Need.STAGE}) if staged else frozenset()
    full = f"{_GATE}:{name}" if name else _GATE
    return Fault(full, (_GATE,), point, about, action, PLANT / "deaths.py", arguments, needs=needs, says=says)


def _waker(name: str, about: str, point: Point, action: str, says: str, **arguments: str) -> Fault:
    return Fault(
        f"{_GATE}:{name}",
        (_GATE,),
        point,
        about,
        action,
        PLANT / "wakers.py",
        {"program": "waiter", **arguments},
        needs=frozenset({Need.STAGE}),
        says=(" of the checkpoint were not restored: ", says),
    )


_OPENBOX = {"command": "openbox", "sig": "SIGKILL"}
_ENDED = "1 of "
_GONE = "restored processes no longer run: 'openbox'"

ALIVE_FAULTS = [
    _fault(
        "",
        "the window manager is killed a second after the desktop answered",
        Point.READY,
        "kill_later",
        {**_OPENBOX, "delay_s": 1.0},
        _ENDED,
        _GONE,
    ),
    _fault(
        "held",
        "it is told to end while held, and ends when let go",  # a SIGKILL then is a restore that fails
        Point.PRE_RESUME,
        "kill",
        {"command": "openbox", "sig": "SIGTERM", "wait": False},
        _GONE,
    ),
    _fault("resumed", "it is killed before the desktop answers", Point.RESUMED, "kill", _OPENBOX, _GONE),
    _fault("at-once", "it is killed as the desktop answers, at 0 s", Point.READY, "kill", _OPENBOX, _GONE),
    _fault(
        "late",
        "a message bus is killed 4.5 s after the desktop answered",
        Point.READY,
        "kill_later",
        {"command": "dbus-daemon", "sig": "SIGKILL", "delay_s": 4.5},
        "'dbus-daemon'",
    ),
    _fault("last-moment", "it is killed in the last moment of the 5 s", Point.SETTLED, "kill", _OPENBOX, _GONE),
    _fault(
        "terminated",
        "the window manager ends in the ordinary way",
        Point.READY,
        "kill",
        {"command": "openbox", "sig": "SIGTERM"},
        _GONE,
    ),
    _fault(
        "replaced",
        "another process with the same name and the same pid inside has taken its place",
        Point.READY,
        "replace",
        {"command": "openbox"},
        _GONE,
    ),
    _fault(
        "threads",
        "a process with several threads ends",
        Point.READY,
        "tell",
        {"program": "threads", "sig": "SIGUSR2", "ends": True},
        "restored processes no longer run",
        staged=True,
    ),
    _waker("timer-stopped", "a timer no longer fires", Point.PRE_RESUME, "change_timerfd", "timerfd", how="stop"),
    _waker(
        "timer-interval",
        "a timer fires once a day, and fired every hour",
        Point.PRE_RESUME,
        "change_timerfd",
        "interval 3600 s",
        how="interval",
    ),
    _waker("timer-deleted", "a POSIX timer is gone", Point.RESTORED, "delete_timer", "timer 0"),
    _waker(
        "x-client-cut",
        "an X client's connection to the display is shut",
        Point.PRE_RESUME,
        "cut_connection",
        "connection",
        how="shut",
    ),
    _waker(
        "x-client-mute",
        "an X client can send the display no request",
        Point.PRE_RESUME,
        "cut_connection",
        "connection",
        how="shut-write",
    ),
    _waker(
        "x-client-closed",
        "an X client has lost its connection to the display",
        Point.RESTORED,
        "cut_connection",
        "connection",
        how="close",
    ),
    Fault(
        "harmless:leader-ends",
        (),
        Point.READY,
        "the first thread of a process ends, the others live on",
        "tell",
        PLANT / "deaths.py",
        {"program": "threads", "sig": "SIGUSR1", "ends": False},
        needs=frozenset({Need.STAGE}),
    ),
]
"""Faults of `alive_after_resume`."""
