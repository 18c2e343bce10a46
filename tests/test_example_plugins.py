"""The packages in `plugins/`: their own tests pass, and pip installs what drums then finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from requires import requires
from scratch import scratch_state

from drums_core.plugins import build_manager
from drums_verifiers import installed

PLUGINS = sorted(x.parent for x in (Path(__file__).parents[1] / "plugins").glob("*/pyproject.toml"))


def call(*command: str, cwd: Path | None = None, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda x: x.name)
def test_its_own_tests_pass(plugin: Path) -> None:
    call("pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "tests", cwd=plugin, PYTHONPATH="src")


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda x: x.name)
def test_it_is_documented_and_licensed(plugin: Path) -> None:
    assert (plugin / "README.md").read_text().startswith("# ")
    assert 'license = "Apache-2.0"' in (plugin / "pyproject.toml").read_text()


def test_pip_installs_what_drums_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a folder of its own: the environment that runs the tests stays as it is."""
    site = tmp_path / "site-packages"
    call("pip", "install", "-q", "--no-deps", "--disable-pip-version-check", "--target", str(site), *map(str, PLUGINS))
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    plugins = build_manager()
    record = next(r for r in plugins.records if r.name == "hostname")
    assert record.ok and (record.distribution, record.version) == ("drums-gate-example", "0.1.0")
    assert "hostname" in plugins.registry.gates
    found = installed.find("example_files")
    assert (found.distribution, found.file) == (
        "drums-verifier-example",
        site / "drums_verifier_example" / "files.py",
    )
    installed.require_function(found, "renamed_folder")


@requires("root", "criu")
def test_the_gate_works_where_it_is_installed(tmp_path: Path) -> None:
    """In an environment with the package: listed, in reports (its fault is caught), and no clean restore is flagged.

    The golden checkpoint was made without it, and is made anew.
    """
    gate = next(x for x in PLUGINS if x.name == "drums-gate-example")
    venv = tmp_path / "venv"
    call("venv", "--without-pip", str(venv))
    site = next((venv / "lib").glob("python*/site-packages"))
    call("pip", "install", "-q", "--no-deps", "--disable-pip-version-check", "--target", str(site), str(gate))
    # What this environment has, drums among it: a fresh one of its own would take minutes to fill.
    (site / "drums-tests.pth").write_text("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")\n")

    def drums(*arguments: str) -> Any:
        command = [str(venv / "bin/python"), "-m", "drums", *arguments, "--json"]
        environment = {**os.environ, "DRUMS_STATE_DIR": str(config.state_dir)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    with scratch_state() as config:
        row = next(x for x in drums("gates", "ls")["gates"] if x["gate"] == "hostname")
        assert (row["package"], row["phase"], row["faults"]) == ("drums-gate-example 0.1.0", "pre_resume", 1)
        found = drums("gates", "selftest", "hostname", "--clean", "2")
    assert (found["planted"], found["caught"], found["clean"], found["false_alarms"]) == (1, 1, 2, 0)
    assert found["faults"][0]["caught_by"] == ["hostname"]
    assert "the host name changed" in found["faults"][0]["reasons"][0]
