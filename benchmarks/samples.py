"""What the benchmarks share: samples by name, a table of them, a timed checker, and turns with another checkout."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Samples = dict[str, list[float]]


class Timed:
    """A checker that notes when it was asked and when it had its score."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.began, self.ended = inner, 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def check(self, context: Any) -> float:
        """As the checker does."""
        self.began = time.perf_counter()
        score: float = await self.inner.check(context)
        self.ended = time.perf_counter()
        return score


def arguments(description: str | None, *, rounds: int, alternates: bool = False) -> argparse.ArgumentParser:
    """A parser of `--rounds` and `--json`, and `--against` where the benchmark can alternate."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true", help="print the samples as JSON")
    if alternates:
        parser.add_argument("--against", type=Path, help="another checkout to alternate with")
    return parser


def tell(samples: Samples, *, as_json: bool = False) -> None:
    """The samples as JSON, or a row each: median, least, greatest, and how many."""
    if as_json:
        json.dump(samples, sys.stdout)
        return
    print(f"{'what':44} {'median':>8} {'min':>8} {'max':>8}  n")
    for name, values in samples.items():
        print(f"{name:44} {statistics.median(values):8.1f} {min(values):8.1f} {max(values):8.1f}  {len(values)}")


def alternate(script: str, other: Path, rounds: int, *, each: int) -> None:
    """Run a script `rounds` times here and there in turn, with so many rounds of its own each; both tables.

    Args:
        script: it runs with the interpreter, and so the code, of either checkout.
    """
    here = Path(script).resolve().parent.parent
    merged: dict[str, Samples] = {"here": {}, "there": {}}
    for _ in range(rounds):
        for label, checkout in (("there", other), ("here", here)):
            command = [str(checkout / ".venv/bin/python"), script, "--rounds", str(each), "--json"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=checkout)
            for name, values in json.loads(done.stdout).items():
                merged[label].setdefault(name, []).extend(values)
    for label, samples in merged.items():
        print(f"{label}:")
        tell(samples)
