"""How long a cheap checker takes, in milliseconds, from when there is something to ask: median and spread.

    sudo .venv/bin/python benchmarks/checker_speed.py [--rounds 10] [--json]
    sudo .venv/bin/python benchmarks/checker_speed.py --against /path/to/another/checkout

On a copy: from the moment at which its gates have passed. In place: from the moment at which the checker is called.
Whole: what a caller of `verify` waits.
With `--against` the same rounds run in turn with another checkout's code (its own `.venv`), A B A B, so that a drifting
machine meets both alike. Not a test: nothing here passes or fails.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import trio
from samples import Samples, Timed, alternate, arguments, tell

from drums_core import load_config, open_host
from drums_core.model import Task

PAUSE_S = 1.0  # as between the verifies of an agent that does something in between
VERIFIER = """
def last(desktop, task):
    return 1.0

def exists(desktop, task):
    return float(desktop.exists("/tmp"))
"""
COMMAND = {"type": "vm_command_line", "command": "echo yes", "shell": True}
EVALUATORS: dict[str, dict[str, Any]] = {
    "verifier, asks nothing": {"func": "drums_verifier", "verifier": "benchmark", "function": "last"},
    "verifier, one question": {"func": "drums_verifier", "verifier": "benchmark", "function": "exists"},
    "OSWorld, one command": {
        "func": "exact_match",
        "result": COMMAND,
        "expected": {"type": "rule", "rules": {"expected": "yes\n"}},
    },
}


def install(folder: Path) -> None:
    """The verifier, as an installed package in a folder."""
    folder.chmod(0o755)
    (folder / "benchmark_verifier.py").write_text(VERIFIER)
    facts = folder / "benchmark_verifier-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: benchmark-verifier\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[drums_verifier]\nbenchmark = benchmark_verifier\n")
    (facts / "RECORD").write_text("benchmark_verifier.py,,\n")
    sys.path.append(str(folder))


async def measure(rounds: int) -> Samples:
    """Samples by checker and way."""
    samples: Samples = {}
    ready = [0.0]

    async def note_ready(at: Any) -> None:
        if at.point == "ready" and at.slot.startswith("c-"):  # a copy's gates up to `ready` have passed
            ready[0] = time.perf_counter()

    async with open_host(load_config(), interposer=note_ready) as host, AsyncExitStack() as stack:
        checkers = {name: (Timed(checker), plugin) for name, (checker, plugin) in host.checkers.items()}
        host.checkers = checkers
        slots = {}
        for name, evaluator in EVALUATORS.items():
            task = Task(f"benchmark-{len(slots)}", "benchmark", (), evaluator, "benchmark", f"{len(slots)}" * 64)
            slots[name] = await stack.enter_async_context(await host.create(task, purpose="benchmark"))
        for slot in slots.values():
            await slot.wait_valid()
        for number in range(-1, rounds):  # the first warms caches
            for name, slot in slots.items():
                for way, in_place in (("copy", False), ("in place", True)):
                    await trio.sleep(PAUSE_S)
                    asked = time.perf_counter()
                    reward = await slot.verify(in_place=in_place)
                    whole = time.perf_counter() - asked
                    assert reward.score == 1.0, reward
                    used = max((checker for checker, _ in checkers.values()), key=lambda x: x.ended)
                    took = used.ended - (used.began if in_place else ready[0])
                    if number >= 0:
                        samples.setdefault(f"{name}, {way}", []).append(took * 1e3)
                        samples.setdefault(f"{name}, {way}, whole", []).append(whole * 1e3)
    return samples


def main() -> None:
    """Parse the arguments and run."""
    options = arguments(__doc__, rounds=10, alternates=True).parse_args()
    if options.against:
        alternate(__file__, options.against, options.rounds, each=3)
        return
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        samples = trio.run(measure, options.rounds)
    tell(samples, as_json=options.json)


if __name__ == "__main__":
    main()
