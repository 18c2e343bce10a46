"""Run a trial that enters namespaces, in a helper process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import attrs

TIMEOUT_S = 15.0


@attrs.frozen
class Answer:
    """What a trial said.

    Args:
        ok: whether it went as it must.
        detail: one line.
    """

    ok: bool
    detail: str


def run_trial(name: str, *args: str) -> Answer:
    """Run one of `trial_helper`'s trials; its namespaces and their mounts end with it.

    Args:
        name: the trial.
        args: what it takes.
    """
    command = [sys.executable, "-I", "-m", "drums_core.doctor.trial_helper", name, *args]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Answer(False, f"no end within {TIMEOUT_S:.0f} s")
    try:
        answer = json.loads(done.stdout)
        return Answer(bool(answer["ok"]), str(answer["detail"]))
    except (ValueError, KeyError):
        last = done.stderr.strip().splitlines()[-1:] or ["nothing said"]
        return Answer(False, f"exit code {done.returncode}: {last[0][-300:]}")
