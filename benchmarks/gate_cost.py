"""What the gates before `ready` cost, in milliseconds: each alone, as an episode's report has it, and all together.

    sudo .venv/bin/python benchmarks/gate_cost.py [--rounds 10] [--megabytes 50] [--json]

On a fork of the image's desktop with a home of that size. `alone` is a gate called once more afterwards,
`reported` is `duration_ms` of the episode's report; `together` is the time that the held desktop waits for a phase's
gates. The baseline in the same run is reading the home's files once, hash left out.
"""

from __future__ import annotations

import time
from pathlib import Path

import trio
from samples import Samples, arguments, tell

from drums_core import load_config, open_host
from drums_core.abc import EventGate
from drums_core.desktop import HOME
from drums_core.model import Phase
from drums_core.slot import Slot

FILL = """
import os
os.makedirs("/home/user/bulk")
for number in range({megabytes} * 2):
    with open(f"/home/user/bulk/{{number}}", "wb") as f:
        f.write(os.urandom(1 << 19))
"""
PHASES = (Phase.RESTORED, Phase.PRE_RESUME, Phase.READY)


def read_all(home: Path) -> None:
    """Every byte of the folder that `FILL` made."""
    for path in sorted((home / "bulk").iterdir()):
        with path.open("rb", buffering=0) as f:
            while f.read(1 << 20):
                pass


async def measure(rounds: int, megabytes: int) -> Samples:
    """Samples by gate and phase."""
    samples: Samples = {}

    def add(name: str, milliseconds: float) -> None:
        samples.setdefault(name, []).append(milliseconds)

    async def one(child: Slot) -> None:
        desktop = child.desktop
        assert desktop is not None
        for line in child.gates()["gates"]["gates"]:
            if line["status"] != "pending" and line["phase"] in PHASES:
                add(f"{line['gate']} reported", line["duration_ms"])
        began = time.perf_counter()
        await trio.to_thread.run_sync(read_all, desktop.root / HOME)
        add("reading the home (baseline)", (time.perf_counter() - began) * 1e3)
        evidence = await trio.to_thread.run_sync(desktop.evidence)
        total = 0.0
        for phase in PHASES:
            began = time.perf_counter()
            await child.host.services.gates.check(phase, desktop.view(), evidence)
            spent = (time.perf_counter() - began) * 1e3
            add(f"{phase} together", spent)
            total += spent
        add("all before ready", total)
        for loaded in child.host.services.gates._gates:
            if not isinstance(loaded.gate, EventGate) and loaded.gate.phase in PHASES:
                began = time.perf_counter()
                await loaded.gate.check(desktop.view(), evidence.get(loaded.name))
                add(f"{loaded.name} alone", (time.perf_counter() - began) * 1e3)

    async with open_host(load_config()) as host, await host.create(purpose="benchmark") as parent:
        await parent.execute(["python3", "-c", FILL.format(megabytes=megabytes)])
        for number in range(rounds + 1):
            (child,) = await parent.fork(1)
            async with child:
                if number:  # the first warms caches and imports
                    await one(child)
    return samples


def main() -> None:
    """Parse the arguments and run."""
    parser = arguments(__doc__, rounds=10)
    parser.add_argument("--megabytes", type=int, default=50, help="size of the home")
    options = parser.parse_args()
    samples = trio.run(measure, options.rounds, options.megabytes)
    tell(dict(sorted(samples.items())), as_json=options.json)


if __name__ == "__main__":
    main()
