"""The `drumsd` command: `drums serve` under the name that service units know."""

from __future__ import annotations

import sys

from drums.cli import main as drums


def main() -> None:
    """Run it."""
    drums(["serve", *sys.argv[1:]])
