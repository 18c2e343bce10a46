"""`drums doctor`: every probe is live, says what it saw, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from drums.errors import PrerequisiteError
from drums_core.commands.doctor import doctor
from drums_core.config import DEFAULT_STATE_DIR
from drums_core.doctor import Diagnosis, Finding, diagnose
from drums_core.doctor.diagnose import PROBES
from drums_core.sys import enter

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 and "root" not in os.environ.get("DRUMS_REQUIRE", ""), reason="the probes need root"
)
STATE_DIR = Path(os.environ.get("DRUMS_STATE_DIR", DEFAULT_STATE_DIR))
NOBODY = 65534


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    """One real run of every probe."""
    return diagnose(STATE_DIR)


@pytest.fixture
def overlay_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on a real overlay, which cannot carry a desktop's upper layer."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    enter.mount("overlay", str(tmp_path / "merged"), "overlay", [], options)
    yield tmp_path / "merged"
    enter.umount(str(tmp_path / "merged"))


def by_name(diagnosis: Diagnosis, name: str) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.name == name)


@pytest.mark.parametrize("name", PROBES)
def test_this_host_passes_what_is_needed(diagnosis: Diagnosis, name: str) -> None:
    """Every probe that is needed passes where the other tests run, and every finding says what it saw."""
    finding = by_name(diagnosis, name)
    assert finding.ok or not finding.needed, finding
    assert finding.observed and finding.wanted
    assert bool(finding.remedy) == (not finding.ok)


def test_nothing_is_left(tmp_path: Path) -> None:
    """No file, mount, cgroup or process of a probe outlives it."""
    diagnose(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []
    assert "drums-doctor" not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    assert not list(Path("/sys/fs/cgroup").glob("**/drums-doctor-*"))
    assert psutil.Process().children(recursive=True) == []


def test_json_has_one_object() -> None:
    """`--json` prints one object with `ok` and the probes' five facts and remedy."""
    result = CliRunner().invoke(doctor, ["--json", "--state-dir", str(STATE_DIR)])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["ok"] is True
    assert [probe["name"] for probe in answer["probes"]] == list(PROBES)
    types = {"name": str, "needed": bool, "ok": bool, "observed": str, "wanted": str, "remedy": str}
    for probe in answer["probes"]:
        assert {key: type(value) for key, value in probe.items()} == types


def test_plain_text_without_a_terminal() -> None:
    """Without a terminal each probe is one line, its mark first."""
    result = CliRunner().invoke(doctor, ["--state-dir", str(STATE_DIR)])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert [line.split()[1] for line in lines[:-1]] == list(PROBES)
    assert lines[-1] == "this host can run desktops"


def test_a_state_folder_on_an_overlay_is_missing_a_need(overlay_folder: Path) -> None:
    """A state folder that cannot carry an upper layer: exit code 1, the probe named, with a remedy."""
    result = CliRunner().invoke(doctor, ["--json", "--state-dir", str(overlay_folder)])
    assert result.exit_code == 1
    probes = {probe["name"]: probe for probe in json.loads(result.stdout)["probes"]}
    assert probes["state_dir"]["ok"] is False
    assert "overlay" in probes["state_dir"]["observed"]
    assert "DRUMS_STATE_DIR" in probes["state_dir"]["remedy"]
    assert probes["user_namespace"]["ok"] is True


def test_a_program_that_is_no_criu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DRUMS_CRIU naming something else than CRIU: exit code 1, in words."""
    monkeypatch.setenv("DRUMS_CRIU", "/bin/false")
    result = CliRunner().invoke(doctor, ["--state-dir", str(STATE_DIR)])
    assert result.exit_code == 1
    assert "'/bin/false' is no CRIU" in result.stdout
    assert result.stdout.splitlines()[-1] == "missing: criu"


def test_no_criu_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a CRIU the remedy is the command that installs one."""
    monkeypatch.delenv("DRUMS_CRIU", raising=False)
    finding = PROBES["criu"](tmp_path)
    assert not finding.ok and finding.needed
    assert finding.remedy == "drums doctor --install-criu"


def test_a_probe_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that raises counts as missing, and the others still run."""

    def broken(state_dir: Path) -> Finding:
        raise RuntimeError("planted")

    monkeypatch.setitem(PROBES, "kernel", broken)
    diagnosis = diagnose(STATE_DIR)
    assert not diagnosis.ok
    assert "planted" in by_name(diagnosis, "kernel").observed
    assert by_name(diagnosis, "python").ok


def test_another_user_is_told_in_words() -> None:
    """Not root: exit code 1, the remedy named, no traceback."""
    # The first call, as root, loads every module: the other user may not be able to read this Python's folder.
    script = (
        "import os, sys\n"
        "from drums.cli import main\n"
        "def call(*argv):\n"
        "    sys.argv[1:] = argv\n"
        "    try:\n"
        "        return main() or 0\n"
        "    except SystemExit as end:\n"
        "        return end.code\n"
        "call('doctor', '--help')\n"
        "call('doctor', '--no-such-option')\n"
        f"os.setgroups([]); os.setresgid(*3 * [{NOBODY}]); os.setresuid(*3 * [{NOBODY}])\n"
        "print('----', file=sys.stderr, flush=True)\n"
        "sys.exit(call('doctor'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    said = done.stderr.partition("----\n")[2]
    assert done.returncode == 1, done.stderr
    assert "needs root" in said and "sudo" in said
    assert "Traceback" not in done.stderr


def test_another_user_gets_a_prerequisite_error() -> None:
    """Not root, embedded: the error is `PrerequisiteError` with the fact `missing`."""
    script = (
        "import os\n"
        "from drums_core.doctor import diagnose\n"
        "from pathlib import Path\n"
        f"os.setresuid(*3 * [{NOBODY}])\n"
        "try:\n"
        "    diagnose(Path('/var/lib/drums'))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error.missing)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [PrerequisiteError.__name__, "root"], done.stderr
