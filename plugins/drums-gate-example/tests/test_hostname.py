"""The clean case, and each way in which the gate can fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from drums_gate_example import hostname

from drums_core.plugins import build_manager
from drums_core.testing import check_gate, check_gate_shape, require


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


def test_it_conforms(tmp_path: Path) -> None:
    """Every rule for gates, with each way in which this one can fail."""
    for name in ("right", "changed", "link", "absent"):
        (tmp_path / name / "etc").mkdir(parents=True)
    (tmp_path / "right/etc/hostname").write_text("desktop\n")
    (tmp_path / "changed/etc/hostname").write_text("other\n")
    (tmp_path / "link/etc/hostname").symlink_to("/etc/hostname")
    faulty = {name: view(tmp_path / name) for name in ("changed", "link", "absent")}
    require(check_gate_shape(hostname.HostnameGate))
    require(trio.run(lambda: check_gate(hostname.HostnameGate(), view(tmp_path / "right"), faulty=faulty)))


@pytest.mark.parametrize("planted", ["link", "absent"])
def test_what_cannot_be_read_raises(tmp_path: Path, planted: str) -> None:
    """And so fails closed."""
    (tmp_path / "etc").mkdir()
    if planted == "link":
        (tmp_path / "etc/hostname").symlink_to("/etc/hostname")
    with pytest.raises(OSError):
        trio.run(hostname.HostnameGate().check, view(tmp_path), "desktop")
