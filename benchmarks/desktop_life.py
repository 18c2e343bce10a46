"""How long the operations of a desktop's life take, in milliseconds: median and spread, alternating with a baseline.

    sudo .venv/bin/python benchmarks/desktop_life.py [--rounds 10] [--json]
    sudo .venv/bin/python benchmarks/desktop_life.py --against /path/to/another/checkout

The baseline in the same run is what a desktop without checkpoints costs: booting the same image until its guest server
answers. With `--against`, the same rounds run in turn with another checkout's code (its own `.venv`), A B A B, so that
a drifting machine meets both alike. Not a test: nothing here passes or fails.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from samples import Samples, Timed, alternate, arguments, tell

from drums_core import load_config, open_host
from drums_core.desktop import Desktop
from drums_core.model import Task

# Its checker runs one command in the desktop.
TASK = Task(
    id="benchmark",
    instruction="Make a folder named done in your home directory.",
    config=(),
    evaluator={
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "test -d ~/done && echo yes || echo no", "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "yes\n"}},
    },
    domain="benchmark",
    sha256="0" * 64,
)


async def measure(rounds: int) -> Samples:
    """Samples by operation."""
    samples: Samples = {}

    async def timed(name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        began = time.perf_counter()
        result = await work()
        samples.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
        return result

    ready: list[float] = []

    async def note_ready(at: Any) -> None:
        if at.point == "ready" and at.slot.startswith("c-"):  # a copy's gates up to `ready` have passed
            ready.append(time.perf_counter())

    async with open_host(load_config(), interposer=note_ready) as host:
        checkers = {name: (Timed(checker), plugin) for name, (checker, plugin) in host.checkers.items()}
        host.checkers = checkers
        await host.golden(host.config.image)
        image = host.images.load(host.config.image)
        async with await host.create(purpose="benchmark"):
            pass  # the first restore warms caches and imports
        for _ in range(rounds):
            booted = Desktop(host.services, f"d-{uuid.uuid4().hex[:12]}", host.config.limits)
            try:
                await timed("boot (baseline)", lambda booted=booted: booted.start_booted(image.layer))
            finally:
                await booted.stop()
            slot = await timed("create", lambda: host.create(TASK, purpose="benchmark"))
            try:
                await timed("step", lambda slot=slot: slot.step("pyautogui.moveTo(300, 300)"))
                await timed("screenshot", slot.screenshot)
                await slot.wait_valid()
                await timed("verify (copy)", slot.verify)
                scored = max(checker.ended for checker, _ in checkers.values())
                samples.setdefault("checker after copy ready", []).append((scored - ready[-1]) * 1e3)
                await timed("verify (in place)", lambda slot=slot: slot.verify(in_place=True))
                for count in (1, 4):
                    children = await timed(f"fork {count}", lambda slot=slot, count=count: slot.fork(count))
                    for child in children:
                        await child.close()
                await timed("reset", slot.reset)
                report = slot.gates()["gates"]["gates"]
                for line in (line for line in report if line["status"] != "pending"):
                    samples.setdefault(f"gate {line['gate']}", []).append(line["duration_ms"])
            finally:
                await timed("close", slot.close)
    return samples


def main() -> None:
    """Parse the arguments and run."""
    options = arguments(__doc__, rounds=10, alternates=True).parse_args()
    if options.against:
        alternate(__file__, options.against, options.rounds, each=1)
        return
    samples = trio.run(measure, options.rounds)
    tell(samples, as_json=options.json)


if __name__ == "__main__":
    main()
