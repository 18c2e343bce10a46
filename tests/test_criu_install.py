"""The CRIU of this host: found, tried, installed, refused; never half-usable."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drums.errors import PrerequisiteError
from drums_core.config import DEFAULT_STATE_DIR
from drums_core.criu_provider import Criu, find_criu, install_criu, prefix, probe_criu
from drums_core.private_apt import PrivateApt, debian_mirror

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 and "root" not in os.environ.get("DRUMS_REQUIRE", ""), reason="CRIU needs root"
)
STATE_DIR = Path(os.environ.get("DRUMS_STATE_DIR", DEFAULT_STATE_DIR))
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "DRUMS_CRIU"}


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts without the operator's override."""
    monkeypatch.delenv("DRUMS_CRIU", raising=False)


@pytest.fixture
def criu() -> Criu:
    """The CRIU that the set-up installed."""
    return find_criu(STATE_DIR)


@pytest.fixture
def copy(tmp_path: Path, criu: Criu) -> Path:
    """A state folder with a copy of the installed CRIU, for a test to damage."""
    shutil.copytree(STATE_DIR / "criu", tmp_path / "criu", symlinks=True)
    return tmp_path


def write_launcher(path: Path, criu: Criu, otherwise: str) -> Path:
    """A program that knows its version as CRIU does, and does something else when it is asked to work."""
    text = f'#!/bin/sh\n[ "$1" = --version ] && exec {criu.path} --version\n{otherwise}\n'
    path.write_text(text, encoding="ascii")
    path.chmod(0o755)
    return path


def installer(state_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "drums_core.criu_provider", str(state_dir)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_launcher_speaks_rpc(criu: Criu) -> None:
    """`launcher swrk FD` answers a version request on the socket, with the version that is recorded."""
    script = (
        "import socket, subprocess, sys\n"
        "launcher, messages = sys.argv[1:]\n"
        "sys.path.insert(0, messages)\n"
        "import rpc_pb2, stats_pb2\n"
        "ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "process = subprocess.Popen([launcher, 'swrk', str(theirs.fileno())], pass_fds=[theirs.fileno()])\n"
        "theirs.close()\n"
        "request = rpc_pb2.criu_req(type=rpc_pb2.VERSION)\n"
        "ours.send(request.SerializeToString())\n"
        "answer = rpc_pb2.criu_resp()\n"
        "answer.ParseFromString(ours.recv(1 << 20))\n"
        "ours.close(); process.wait()\n"
        "version = answer.version\n"
        "print(version.major_number, version.minor_number, version.sublevel, sep='.')\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, str(criu.path), str(criu.pycriu_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    version = done.stdout.strip()
    assert version == criu.version or version == f"{criu.version}.0"


def test_the_installed_criu_passes(criu: Criu) -> None:
    """What `find_criu` gives dumps and restores here, and the trial leaves no process."""
    result = probe_criu(criu.path, criu.pycriu_dir)
    assert result.ok, result
    assert result.dump_ms > 0 and result.restore_ms > 0
    assert psutil.Process().children(recursive=True) == []


def test_a_criu_that_fails_is_refused(tmp_path: Path, criu: Criu) -> None:
    """A CRIU that starts but cannot dump is refused, with the stage and its exit code."""
    result = probe_criu(write_launcher(tmp_path / "criu", criu, "exit 7"), criu.pycriu_dir)
    assert not result.ok
    assert result.stage == "dump"
    assert "exit code 7" in result.detail or "hung up" in result.detail


def test_a_criu_that_loses_the_tree_is_refused(tmp_path: Path, criu: Criu) -> None:
    """A CRIU whose restore does nothing is refused: what counts is that the processes run on."""
    # The first call (the dump) is real; the second ends at once.
    script = f'[ -e {tmp_path}/dumped ] && exit 0\n: > {tmp_path}/dumped\nexec {criu.path} "$@"'
    result = probe_criu(write_launcher(tmp_path / "criu", criu, script), criu.pycriu_dir)
    assert not result.ok
    assert result.stage == "restore"
    assert result.dump_ms > 0


def test_a_criu_that_hangs_is_refused_in_time(tmp_path: Path, criu: Criu) -> None:
    """A CRIU that never answers costs the time limit, and nothing of the trial lives on."""
    marker = f"{time.time_ns() % 10**6 + 10**6}"
    began = time.monotonic()
    launcher = write_launcher(tmp_path / "criu", criu, f"exec sleep {marker}")
    result = probe_criu(launcher, criu.pycriu_dir, timeout_s=2)
    assert (result.ok, result.stage) == (False, "timeout")
    assert time.monotonic() - began < 5
    deadline = time.monotonic() + 5
    while any(process.info["cmdline"] == ["sleep", marker] for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "CRIU outlived its trial"


def test_the_override_is_taken(criu: Criu, monkeypatch: pytest.MonkeyPatch) -> None:
    """DRUMS_CRIU names the CRIU to use, and the hash is the binary's, not the launcher's."""
    monkeypatch.setenv("DRUMS_CRIU", str(criu.path))
    found = find_criu(STATE_DIR)
    assert (found.source, found.path, found.version) == ("DRUMS_CRIU", criu.path, criu.version)
    assert found.sha256 == criu.sha256
    assert install_criu(STATE_DIR) == found


@pytest.mark.parametrize("program", ["/bin/false", "/bin/cat", "/no/such/criu"])
def test_a_wrong_override_is_named(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DRUMS_CRIU naming no CRIU is refused by name, in looking and in installing."""
    monkeypatch.setenv("DRUMS_CRIU", program)
    for attempt in (find_criu, install_criu):
        with pytest.raises(PrerequisiteError, match=repr(program)) as caught:
            attempt(STATE_DIR)
        assert "DRUMS_CRIU" in caught.value.hint


def test_an_override_that_fails_the_trial(tmp_path: Path, criu: Criu, monkeypatch: pytest.MonkeyPatch) -> None:
    """An override is tried like any other, and its failure is not papered over by another CRIU."""
    launcher = write_launcher(tmp_path / "criu", criu, "exit 7")
    (tmp_path / "pycriu").symlink_to(criu.pycriu_dir)
    monkeypatch.setenv("DRUMS_CRIU", str(launcher))
    with pytest.raises(PrerequisiteError, match="fails a live dump and restore"):
        install_criu(STATE_DIR)


def test_the_systems_criu_comes_first(tmp_path: Path, criu: Criu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system's CRIU passes, it is taken, and nothing is downloaded."""
    monkeypatch.setattr(prefix, "_SYSTEM_BINARIES", (criu.path,))
    monkeypatch.setattr(prefix, "_SYSTEM_PYCRIU", (criu.pycriu_dir,))
    lines: list[str] = []
    chosen = install_criu(tmp_path, lines.append)
    assert (chosen.source, chosen.version) == ("system", criu.version)
    assert len(lines) == 1
    assert find_criu(tmp_path) == chosen
    assert probe_criu(chosen.path, chosen.pycriu_dir).ok


def test_nothing_installed_is_said(tmp_path: Path) -> None:
    """An empty state folder gives the command that mends it, and stays empty."""
    with pytest.raises(PrerequisiteError) as caught:
        find_criu(tmp_path)
    assert caught.value.hint == "drums doctor --install-criu"
    assert list(tmp_path.iterdir()) == []


def test_a_changed_binary_is_refused(copy: Path) -> None:
    """A CRIU that is not the one that was tried is not used."""
    binary = copy / "criu/current/root/usr/sbin/criu"
    if not binary.exists():
        pytest.skip("the system's CRIU is in use, whose binary no test may change")
    with binary.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(PrerequisiteError, match="sha256"):
        find_criu(copy)


def test_a_prefix_without_its_record_is_nothing(copy: Path) -> None:
    """The record is written last: a prefix without one, or with half of one, does not count."""
    record = copy / "criu/current/criu.json"
    record.write_bytes(record.read_bytes()[:40])
    with pytest.raises(PrerequisiteError):
        find_criu(copy)


def test_two_installers_at_once(copy: Path) -> None:
    """Two installers on one state folder both end well, with one CRIU."""
    processes = [installer(copy), installer(copy)]
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert find_criu(copy).path.parent.parent == copy / "criu"


def test_an_interrupted_install_leaves_nothing_usable(tmp_path: Path) -> None:
    """SIGKILL in the middle leaves no CRIU to be found; the next install sweeps up and succeeds."""
    home = tmp_path / "criu"
    process = installer(tmp_path)
    # The apt root appears once the first candidate is under way.
    while not list(home.glob(".new-*/apt")):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(home.glob(".new-*")), "the test must interrupt it in the middle"
    with pytest.raises(PrerequisiteError):
        find_criu(tmp_path)
    (home / ".new-link").symlink_to("nowhere")
    lines: list[str] = []
    chosen = install_criu(tmp_path, lines.append)
    assert chosen == find_criu(tmp_path)
    assert any("works" in line for line in lines)
    assert sorted(path.name for path in home.iterdir()) == sorted([".lock", chosen.path.parent.name, "current"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "sources.list",
            "# old\ndeb http://vendor.test/apt x main\ndeb [arch=amd64] http://one.test/debian/ bookworm main",
        ),
        ("sources.list.d/debian.sources", "Types: deb\nURIs: http://one.test/debian-security http://one.test/debian\n"),
    ],
)
def test_the_mirror_is_the_hosts(tmp_path: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both formats of apt's sources give the Debian archive, other archives passed over."""
    monkeypatch.delenv("DRUMS_DEBIAN_MIRROR", raising=False)
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert debian_mirror(tmp_path) == "http://one.test/debian"


def test_no_mirror_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a Debian archive is told which settings help."""
    monkeypatch.delenv("DRUMS_DEBIAN_MIRROR", raising=False)
    with pytest.raises(PrerequisiteError) as caught:
        debian_mirror(tmp_path)
    assert "DRUMS_DEBIAN_MIRROR" in caught.value.hint


def test_a_mirrors_password_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with the source that failed, nor in what apt says of it."""
    monkeypatch.setenv("DRUMS_DEBIAN_MIRROR", "http://me:p@ss:w0rd@127.0.0.1:1/debian")
    apt = PrivateApt(tmp_path, [f"deb [signed-by=/key.asc] {debian_mirror()} trixie main"])
    with pytest.raises(PrerequisiteError) as info:
        apt.download(["criu"])
    assert "http://127.0.0.1:1/debian trixie main" in str(info.value)
    assert "p@" not in str(info.value) and "w0rd" not in str(info.value)
