"""Does a CRIU work here? Only a real dump and restore can say: version numbers do not tell about this kernel."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import attrs

from drums.errors import PrerequisiteError

TIMEOUT_S = 30.0


@attrs.frozen
class ProbeResult:
    """What a live dump and restore showed.

    Args:
        ok: the processes ran on after the restore, with their memory, locks and connection.
        stage: the step that failed, or "done".
        detail: one line: what was seen.
        log: CRIU's own error lines.
        dump_ms: how long the dump took; 0 when it was not reached.
        restore_ms: how long the restore took; 0 when it was not reached.
    """

    ok: bool
    stage: str
    detail: str
    log: tuple[str, ...] = ()
    dump_ms: float = 0.0
    restore_ms: float = 0.0

    def __str__(self) -> str:
        if self.ok:
            return f"dump {self.dump_ms:.0f} ms, restore {self.restore_ms:.0f} ms"
        return f"{self.stage}: {self.detail}" + "".join(f"; {line}" for line in self.log[:2])


def probe_criu(launcher: Path, pycriu_dir: Path, *, timeout_s: float = TIMEOUT_S) -> ProbeResult:
    """Dump and restore a small tree of processes that is shaped like a desktop.

    It runs in a helper process, in namespaces that end with it: whatever happens, no process, mount or file is left.
    The helper also keeps this CRIU's message modules apart from those of another one in the caller.

    Args:
        launcher: the CRIU to try, started as `launcher swrk FD`.
        pycriu_dir: its message modules, flat.
        timeout_s: seconds after which the attempt counts as failed.

    Raises:
        PrerequisiteError: the caller is not root.
    """
    command = [sys.executable, "-I", "-m", "drums_core.criu_provider.probe_helper", str(launcher), str(pycriu_dir)]
    helper = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        out, err = helper.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        helper.kill()
        helper.communicate()
        return ProbeResult(False, "timeout", f"no end within {timeout_s:.0f} s")
    except BaseException:
        helper.kill()
        helper.wait()
        raise
    try:
        answer = json.loads(out)
        return ProbeResult(**{**answer, "log": tuple(answer["log"])})
    except (ValueError, TypeError, KeyError):
        ended = helper.returncode
        how = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
        if "Operation not permitted" in err:
            raise PrerequisiteError(
                f"no privilege for a trial of CRIU: {err.strip().splitlines()[-1]}", hint="run it as root"
            ) from None
        last = err.strip().splitlines()[-1:] or ["nothing said"]
        return ProbeResult(False, "helper", f"{how}: {last[0][-300:]}")
