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

from drums_verifiers import installed
from drums_verifiers.scaffold import create_package

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(x.parent for x in (ROOT / "plugins").glob("*/pyproject.toml"))


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


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with every package of `plugins/`, and one from the template, as pip installs them.

    drums and what it needs are those of the environment that runs the tests, which stays as it is. What they need and
    do not declare shows in `test_plugin_requirements.py`, not here.
    """
    top = tmp_path_factory.mktemp("fresh")
    create_package("fresh-demo", top / "demo")
    call("venv", "--without-pip", str(top / "env"))
    python = top / "env/bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(top / "env"), "platbase": str(top / "env")}))
    mine = [x for x in sys.path if Path(x).name in ("site-packages", "dist-packages")]
    (site / "drums.pth").write_text("\n".join([*mine, str(ROOT)]) + "\n")
    packages = [*map(str, PLUGINS), str(top / "demo")]
    options = ["-q", "--no-deps", "--disable-pip-version-check", "--no-input"]
    call("pip", "--python", str(python), "install", *options, *packages)
    return top


def in_fresh(fresh: Path, *command: str, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    argv = [str(fresh / "env/bin/python"), "-m", *command]
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_drums_finds_what_pip_installed(fresh: Path) -> None:
    """Each with its package, version and hash, and nothing wrong with it."""
    listed = json.loads(in_fresh(fresh, "drums", "plugins", "--json", cwd=fresh))["plugins"]
    found = {(r["group"], r["name"]): r for r in listed}
    for group, name, package in (
        ("drums.gates", "hostname", "drums-gate-example"),
        ("drums_verifier", "example_files", "drums-verifier-example"),
        ("drums_verifier", "fresh-demo", "drums-verifier-fresh-demo"),
    ):
        record = found[group, name]
        assert record["ok"] and not record["error"]
        assert (record["distribution"], record["version"], len(record["sha256"])) == (package, "0.1.0", 64)


@pytest.mark.parametrize("package", ["drums-verifier-example", "demo"])
def test_verifier_packages_pass_there(fresh: Path, package: str) -> None:
    """Their own tests with what is installed, and `drums verifier test` on their folder."""
    place = fresh / "demo" if package == "demo" else ROOT / "plugins" / package
    assert "BROKEN" not in in_fresh(fresh, "drums", "verifier", "test", str(place), cwd=fresh)
    in_fresh(fresh, "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(place / "tests"), cwd=fresh)


def test_a_function_is_found_in_what_pip_installed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source is read in the place where pip put it."""
    [site] = fresh.glob("env/lib/python*/site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    found = installed.find("example_files")
    assert (found.distribution, found.file) == ("drums-verifier-example", site / "drums_verifier_example" / "files.py")
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
