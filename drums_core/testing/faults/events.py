"""Deaths: out of memory, crashes, at every moment and at any depth; and deaths that are none of these."""

from __future__ import annotations

from drums_core.testing.faults.model import PLANT, By, Fault, Need, Point

_FILE = PLANT / "deaths.py"
_CRASH, _ALIVE, _OOM = "no_app_crash", "alive_after_resume", "no_oom_kill"
_VICTIM = "at-spi-bus-laun"  # the window manager makes an abort of each of these signals
_SIGNALS = ("SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "SIGTRAP", "SIGSYS")
_TIGHT = frozenset({Need.TIGHT})
_HOG = "python3 -c \"x = []\nwhile True: x.append(b'x' * (8 << 20))\""


def _by_host(name: str, gates: tuple[str, ...], point: Point, about: str, sig: str, *, wait: bool = True) -> Fault:
    arguments = {"command": _VICTIM, "sig": sig, "wait": wait}
    says = (f"'{_VICTIM}'", f"died of {sig}")
    return Fault(name, gates, point, about, "kill", _FILE, arguments, says=says)


def _by_agent(name: str, about: str, command: str, *says: str, point: Point = Point.VALID, gate: str = _CRASH) -> Fault:
    gates = (gate,) if gate else ()
    return Fault(name, gates, point, about, command, cause="agent", by=By.AGENT, says=says)


EVENT_FAULTS = [
    Fault(
        _OOM,
        (_OOM,),
        Point.READY,
        "the desktop's memory is full, and the kernel kills a process in its cgroup",
        "fill_memory",
        _FILE,
        needs=_TIGHT,
        says=("out-of-memory killer", "1 kills so far, expected 0"),
    ),
    Fault(
        f"{_OOM}:grandchild",
        (_OOM,),
        Point.READY,
        "the process that fills the memory is a child of a child",
        "fill_memory",
        _FILE,
        {"generations": 2},
        needs=_TIGHT,
        says=("1 kills so far, expected 0",),
    ),
    Fault(
        f"{_OOM}:late",
        (_OOM,),
        Point.VALID,
        "the memory is full after the episode was found valid",
        "fill_memory",
        _FILE,
        needs=_TIGHT,
        says=("1 kills so far, expected 0",),
    ),
    Fault(
        f"{_OOM}:while-verified",
        (_OOM,),
        Point.VERIFY,
        "the memory is full while the checker looks",
        "fill_memory",
        _FILE,
        needs=_TIGHT,
        says=("1 kills so far, expected 0",),
    ),
    Fault(
        f"{_OOM}:by-agent",
        (_OOM,),
        Point.VALID,
        "the agent fills the memory",
        _HOG,
        cause="agent",
        needs=_TIGHT,
        by=By.AGENT,
        says=("out-of-memory killer",),
    ),
    _by_host(
        _CRASH,
        (_CRASH,),
        Point.VALID,
        "a service of the desktop dies of a segmentation fault after the verdict",
        "SIGSEGV",
    ),
    *(
        _by_host(f"{_CRASH}:{sig.lower()}", (_CRASH,), Point.VALID, f"a service of the desktop dies of {sig}", sig)
        for sig in _SIGNALS[1:]
    ),
    _by_host(
        f"{_CRASH}:held",
        (_CRASH, _ALIVE),
        Point.PRE_RESUME,
        "a service of the desktop crashes with its first instruction",
        "SIGSEGV",
        wait=False,
    ),
    _by_host(f"{_CRASH}:resumed", (_CRASH, _ALIVE), Point.RESUMED, "it crashes before the desktop answers", "SIGSEGV"),
    _by_host(
        f"{_CRASH}:settled", (_CRASH, _ALIVE), Point.SETTLED, "it crashes in the last moment of the 5 s", "SIGABRT"
    ),
    _by_host(f"{_CRASH}:while-verified", (_CRASH,), Point.VERIFY, "it crashes while the checker looks", "SIGSEGV"),
    _by_agent(
        f"{_CRASH}:by-agent",
        "a program of the agent's crashes",
        "python3 -c 'import ctypes; ctypes.string_at(0)'; true",
        "died of SIGSEGV",
    ),
    _by_agent(
        f"{_CRASH}:early",
        "a program of the agent's crashes in the first seconds",
        "python3 -c 'import os; os.abort()'; true",
        "died of SIGABRT",
        point=Point.UP,
    ),
    _by_agent(
        f"{_CRASH}:signalled",
        "the agent sends a program the signal",
        "sleep 100 & kill -SEGV $!; wait; true",
        "died of SIGSEGV",
    ),
    _by_agent(
        f"{_CRASH}:grandchild",
        "a child of a child crashes",
        "sh -c 'python3 -c \"import os; os.fork() or os.fork() or os.abort(); os.wait()\"; true'; sleep 0.3",
        "died of SIGABRT",
    ),
    _by_agent(
        f"{_CRASH}:between-looks",
        "a process is born, crashes and is reaped before anybody could look",
        "python3 -c 'import os\npid = os.fork() or os.kill(os.getpid(), 11)\nos.waitpid(pid, 0)'",
        "died of SIGSEGV",
    ),
    _by_agent(
        f"{_CRASH}:orphan",
        "a daemon crashes that has left its session and its parent",
        "setsid python3 -c 'import os; os.fork() and os._exit(0); os.abort()' </dev/null >/dev/null 2>&1; sleep 0.3",
        "died of SIGABRT",
    ),
    _by_agent(
        f"{_CRASH}:thread",
        "a thread that is not the first crashes",
        "python3 -c 'import ctypes, threading; threading.Thread(target=ctypes.string_at, args=[0]).start()'; true",
        "died of SIGSEGV",
    ),
    _by_agent(
        f"{_CRASH}:renamed",
        "a process with a name that it gave itself crashes",
        "python3 -c 'import ctypes, os; ctypes.CDLL(None).prctl(15, b\") Z (\", 0, 0, 0); os.abort()'; true",
        "died of SIGABRT",
    ),
    _by_agent(
        f"{_CRASH}:by-agent-while-verified",
        "a program that the agent left running crashes while the checker looks",
        "python3 -c 'import os; os.abort()'; true",
        "died of SIGABRT",
        point=Point.VERIFY,
    ),
    *(
        _by_agent(f"harmless:{name}", about, command, gate="", point=point)
        for name, about, command, point in (
            ("sigkill", "the agent kills a program of its own", "sleep 100 & kill -9 $!; wait", Point.VALID),
            ("sigterm", "the agent ends a program of its own", "sleep 100 & kill $!; wait", Point.VALID),
            ("sigpipe", "a program writes to a closed pipe", "yes | head -1", Point.VALID),
            ("exit-1", "a program ends with 1", "python3 -c 'raise SystemExit(1)'; true", Point.VALID),
            ("exit-139", "a program ends with the number of a crash", "sh -c 'exit 139'; true", Point.VALID),
            (
                "early",
                "the agent is at work in the first seconds",
                "for i in 1 2 3; do sh -c 'exit 2'; done; true",
                Point.UP,
            ),
        )
    ),
    Fault(
        "harmless:oom-of-other",
        (),
        Point.VALID,
        "another desktop's memory is full",
        "fill_other_memory",
        _FILE,
        needs=frozenset({Need.TIGHT, Need.OTHER}),
        other_gates=(_OOM,),
    ),
]
"""Faults of `no_oom_kill` and `no_app_crash`."""
