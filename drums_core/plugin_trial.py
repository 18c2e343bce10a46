"""Loading somebody's plugin in a process of its own first: one that hangs, ends its process or floods shows there.

Stand-alone: it is that process's program as well.

An exception is not looked for: the plugin is loaded again by who asked, and its traceback is theirs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from typing import Any

LIMIT_S = 30.0
OUTPUT_LIMIT = 1 << 20
_AT_ONCE = 4
_SAID_LIMIT = 500


def try_loading(
    entries: Sequence[tuple[str, metadata.EntryPoint]],
    *,
    hooks: Mapping[str, Sequence[str]],
    limit_s: float | None = None,
    tell: bool = False,
) -> list[str]:
    """What is wrong with each entry point, "" where it was loaded or raised an exception.

    Args:
        entries: the group and the entry point of each.
        hooks: names of the functions that are called with a `register` of no effect, by group.
        limit_s: seconds that each may take; `LIMIT_S` by default.
        tell: also what exception it raised, for who does not load it afterwards.
    """
    limit = LIMIT_S if limit_s is None else limit_s
    if not entries:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(entries))) as pool:
        return list(pool.map(lambda x: _try(x[1], hooks.get(x[0], ()), limit, tell), entries))


def _try(entry: metadata.EntryPoint, hooks: Sequence[str], limit_s: float, tell: bool) -> str:
    call = {"path": sys.path, "name": entry.name, "value": entry.value, "group": entry.group, "hooks": list(hooks)}
    done_r, done_w = os.pipe()
    with os.fdopen(done_r, "rb") as done:
        process = subprocess.Popen(
            [sys.executable, __file__],  # not by its name: that would load the whole runtime first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[done_w],
            env={**os.environ, "DRUMS_TRIAL_FD": str(done_w)},
            start_new_session=True,
        )
        os.close(done_w)
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            printed = _drain(process, json.dumps(call).encode())
        finally:
            timer.cancel()
            _kill(process)  # and what it started
            code = process.wait()
            said = done.read(_SAID_LIMIT)
    if printed > OUTPUT_LIMIT:
        return f"it printed more than {OUTPUT_LIMIT >> 20} MiB while it was loaded"
    if said:
        return said[1:].decode(errors="replace") if tell else ""
    if late.is_set():
        return f"it was not loaded within {limit_s:g} s"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name} while it was loaded"
    return f"it ended its process with code {code} while it was loaded"


def _drain(process: subprocess.Popen[bytes], call: bytes) -> int:
    """Hand the call over and read what is printed, to its end or beyond what is allowed."""
    assert process.stdin and process.stdout
    with process.stdin, process.stdout:
        with suppress(BrokenPipeError):  # it died; how tells more
            process.stdin.write(call)
            process.stdin.close()
        printed = 0
        while printed <= OUTPUT_LIMIT and (part := os.read(process.stdout.fileno(), 1 << 16)):
            printed += len(part)
        return printed


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # not waited for: the number is still its
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(call: dict[str, Any]) -> None:
    """The process: load, call the hooks, say so."""
    fd = int(os.environ.pop("DRUMS_TRIAL_FD"))
    error = ""
    try:
        loaded = metadata.EntryPoint(call["name"], call["value"], call["group"]).load()
        if isinstance(loaded, type):
            loaded = loaded()
        for name in call["hooks"]:
            hook = getattr(loaded, name, None)
            if hook is not None:
                hook(lambda *_, **__: None)
    except (Exception, SystemExit) as e:  # noqa: BLE001 - it is told
        error = f"{type(e).__name__}: {e}"
    sys.stdout.flush()
    os.write(fd, b"1" + error.encode(errors="replace")[: _SAID_LIMIT - 1])
    os._exit(0)  # threads that it started do not hold this up


if __name__ == "__main__":
    call = json.load(sys.stdin)
    sys.path[:] = call["path"]
    run(call)
