"""`drums.connect()` without a daemon: one is started for the program's life, and ends with it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from requires import requires

import drums
import drums._endpoint
from drums import _spawn
from drums._transport import SyncTransport

NO_DAEMON = "import drums, drums._spawn\ndrums._spawn.DEFAULT_URL = 'http://127.0.0.1:1'\n"


def start(code: str, **environ: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k != "DRUMS_URL"} | environ
    return subprocess.Popen(
        [sys.executable, "-c", NO_DAEMON + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int, within_s: float = 30) -> bool:
    deadline = time.monotonic() + within_s
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(is_running(pid) for pid in pids)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
@pytest.mark.parametrize("ends", ["by itself", "killed", "starter gone"])
def test_the_keeper(tmp_path: Path, ends: str) -> None:
    """It ends with its command, and ends that when standard input does."""
    report, folder = tmp_path / "pid", tmp_path / "folder"
    folder.mkdir()
    code = f"import os, time; open({str(report)!r}, 'w').write(str(os.getpid()) + '!'); time.sleep(60)"
    keeper = subprocess.Popen(
        [sys.executable, "-m", "drums._keeper", str(folder), sys.executable, "-c", code], stdin=subprocess.PIPE
    )
    assert keeper.stdin is not None
    with keeper:
        while not (report.exists() and report.read_text().endswith("!")):
            time.sleep(0.01)
        child = int(report.read_text()[:-1])
        if ends == "starter gone":
            keeper.stdin.close()
        else:
            os.kill(child, signal.SIGKILL if ends == "killed" else signal.SIGTERM)
        assert gone(child, keeper.pid)
    assert folder.exists() is not (ends == "starter gone")


def test_the_keeper_gives_its_commands_status() -> None:
    """So that a daemon that does not start is noticed."""
    argv = [sys.executable, "-m", "drums._keeper", "/nonexistent", sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as keeper:
        assert keeper.wait(30) == 7


def test_a_daemon_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error has what it said, and nothing is left."""
    monkeypatch.delenv("DRUMS_URL", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(_spawn, "DEFAULT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(_spawn, "_lack", lambda: "")
    monkeypatch.setenv("DRUMS_MAX_SLOTS", "many")
    with pytest.raises(drums.DaemonUnreachable, match=r"and it ended: .*max_slots"):
        drums.connect()
    assert list(tmp_path.iterdir()) == []


@requires("root", "criu")
class TestStarted:
    """With a real daemon."""

    def test_it_lives_as_long_as_the_client(self) -> None:
        """Told on standard error; the token of the environment is another daemon's, and is not sent."""
        code = """
with drums.connect() as client:
    print(client.url, client.health()["max_slots"] > 0, client._daemon._keeper.pid, client._daemon._folder)
import asyncio, trio
async def main():
    async with drums.connect_async() as client:
        print(client.url, (await client.health())["max_slots"] > 0, client._daemon._keeper.pid, client._daemon._folder)
trio.run(main)
asyncio.run(main())
"""
        with start(code, DRUMS_TOKEN="drums_sk_of_another") as program:
            out, err = program.communicate(timeout=120)
        assert program.returncode == 0, err
        assert err.count("drums: no daemon answers at http://127.0.0.1:1; started one for this program's life\n") == 3
        assert len(out.splitlines()) == 3
        for line in out.splitlines():
            url, works, keeper, folder = line.split()
            assert works == "True" and url.startswith("unix:/") and not Path(folder).exists()
            assert gone(int(keeper))

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_it_ends_with_a_program_that_is_killed(self, number: signal.Signals) -> None:
        """No desktop and no daemon outlives the program, whatever ended that."""
        code = """
import subprocess, time
with drums.connect() as client:
    with client.create() as env:
        keeper = client._daemon._keeper.pid
        daemon = subprocess.run(["pgrep", "-P", str(keeper)], capture_output=True, text=True).stdout
        print(keeper, daemon.strip(), client._daemon._folder, flush=True)
        time.sleep(600)
"""
        with start(code) as program:
            assert program.stdout is not None and program.stderr is not None
            line = program.stdout.readline()
            assert line, program.stderr.read()
            keeper, daemon = map(int, line.split()[:2])
            assert is_running(keeper) and is_running(daemon)
            program.send_signal(number)
            program.wait(60)
        assert gone(keeper, daemon) and not Path(line.split()[2]).exists()


def test_stop_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that does not end is killed with its keeper."""
    monkeypatch.setattr(_spawn, "STOP_S", 0.1)
    daemon = _spawn.SpawnedDaemon.__new__(_spawn.SpawnedDaemon)
    daemon._folder = Path("/nonexistent")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.PIPE) as stubborn:
        daemon._keeper = stubborn
        SyncTransport(drums._endpoint.find_endpoint("http://127.0.0.1:1", "")).run(daemon.stopped())
        assert stubborn.returncode == -signal.SIGKILL
