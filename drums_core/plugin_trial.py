"""Loading somebody's plugin in a process of its own first: one that hangs, ends its process or floods shows there.

Stand-alone: it is that process's program as well.

An exception is not looked for: the plugin is loaded again by who asked, and its traceback is theirs.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
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
        try:
            printed, said = _listen(process, done.fileno(), json.dumps(call).encode(), time.monotonic() + limit_s)
        finally:
            late = process.poll() is None
            _kill(process)
            code = process.wait()
    if printed > OUTPUT_LIMIT:
        return f"it printed more than {OUTPUT_LIMIT >> 20} MiB while it was loaded"
    if said:
        return said[1:].decode(errors="replace") if tell else ""
    if late:
        return f"it was not loaded within {limit_s:g} s"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name} while it was loaded"
    return f"it ended its process with code {code} while it was loaded"


def _listen(process: subprocess.Popen[bytes], done: int, call: bytes, deadline: float) -> tuple[int, bytes]:
    """Hand the call over; how much was printed and what was said, once there is an end to it or enough of it.

    Never longer than until the deadline: what the process started may hold its pipes open after it has ended.
    """
    assert process.stdin and process.stdout
    printed = 0
    with process.stdin, process.stdout, selectors.DefaultSelector() as selector:
        with suppress(BrokenPipeError):  # it died; how tells more
            process.stdin.write(call)
            process.stdin.close()
        output = process.stdout.fileno()
        for fd in (output, done):
            selector.register(fd, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            ready = {key.fd for key, _ in selector.select(left)}
            if output in ready:  # first: what was printed before the word counts
                part = os.read(output, 1 << 16)
                printed += len(part)
                if printed > OUTPUT_LIMIT:
                    break
                if not part:
                    selector.unregister(output)
            elif done in ready:
                said = os.read(done, _SAID_LIMIT)
                if not said:
                    with suppress(subprocess.TimeoutExpired):  # it is about to end
                        process.wait(left)
                return printed, said
    return printed, b""


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
