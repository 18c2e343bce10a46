"""The fault that the gate `hostname` has to see, made by a process of its own that knows no gate."""

from __future__ import annotations

from typing import Any


def change_hostname(target: Any) -> None:
    """Write another name into the desktop's `/etc/hostname`, through its tree on the host.

    Args:
        target: a `drums_core.testing.plant.target.Target`: `root`, `pid1`, `pids()`, ...
    """
    (target.root / "etc/hostname").write_text("planted\n", encoding="utf-8")
