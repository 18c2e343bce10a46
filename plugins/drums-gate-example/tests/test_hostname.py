"""The clean case, and each way in which the gate can fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from drums_gate_example import hostname

from drums_core.plugins import build_manager


def view(root: Path) -> Any:
    """What the gate uses of a `DesktopView`."""
    return SimpleNamespace(root=root)


def test_it_registers_its_name() -> None:
    plugins = build_manager([("hostname", hostname)], ambient=False)
    assert not plugins.broken() and set(plugins.registry.gates) == {"hostname"}


def test_equal_passes_and_changed_fails(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hostname").write_text("desktop\n")
    gate = hostname.HostnameGate()
    evidence = trio.run(gate.record, view(tmp_path))
    assert trio.run(gate.check, view(tmp_path), evidence).ok
    (tmp_path / "etc/hostname").write_text("other\n")
    finding = trio.run(gate.check, view(tmp_path), evidence)
    assert not finding.ok and (finding.observed, finding.expected) == ("other", "desktop")


@pytest.mark.parametrize("planted", ["link", "absent"])
def test_what_cannot_be_read_raises(tmp_path: Path, planted: str) -> None:
    """And so fails closed."""
    (tmp_path / "etc").mkdir()
    if planted == "link":
        (tmp_path / "etc/hostname").symlink_to("/etc/hostname")
    with pytest.raises(OSError):
        trio.run(hostname.HostnameGate().check, view(tmp_path), "desktop")
