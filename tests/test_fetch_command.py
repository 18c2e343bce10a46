"""`drums tasks fetch`: what it takes from where, what it says on a terminal and elsewhere, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from drums.cli import cli
from drums_core.task_files.mirror import MARK, mirrored_path

NAMES = ("one.xlsx", "two.xlsx", "three.xlsx", "four.xlsx")
TASK = "11111111-aaaa"
Fetch = Callable[..., Result]


def url(name: str) -> str:
    return f"https://huggingface.co{MARK}folder/{name}"


def fill(folder: Path, *names: str) -> Path:
    """A mirror with these files."""
    for name in names:
        path = folder.joinpath(*mirrored_path(url(name)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return folder


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a host whose one task names four files, and which is told nothing else."""
    examples = tmp_path / "osworld" / "evaluation_examples"
    (examples / "examples" / "os").mkdir(parents=True)
    files = [{"url": url(x), "path": f"/home/user/{x}"} for x in NAMES]
    task = {
        "id": TASK,
        "instruction": "",
        "config": [{"type": "download", "parameters": {"files": files}}],
        "evaluator": {"func": "infeasible"},
    }
    (examples / "test_all.json").write_text(json.dumps({"os": [TASK]}))
    (examples / f"examples/os/{TASK}.json").write_text(json.dumps(task))
    for name in [x for x in os.environ if x.startswith("DRUMS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DRUMS_OSWORLD", str(tmp_path / "osworld"))
    monkeypatch.setenv("DRUMS_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state" / "files"


def fetch(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["tasks", "fetch", TASK, *arguments])


class Mirror(ThreadingHTTPServer):
    """Serves every file but `two.xlsx`, and counts how many are asked for at once."""

    asked: int
    most: int
    lock: threading.Lock
    all_here: threading.Barrier


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Mirror

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.asked += 1
            self.server.most = max(self.server.most, self.server.asked)
        with suppress(threading.BrokenBarrierError):
            self.server.all_here.wait(2)
        with self.server.lock:
            self.server.asked -= 1
        if self.path.endswith("two.xlsx"):
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"data")
        return None

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with Mirror(("127.0.0.1", 0), Handler) as found:
        found.asked, found.most, found.lock = 0, 0, threading.Lock()
        found.all_here = threading.Barrier(1)
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_plain_lines_where_there_is_no_terminal(store: Path, tmp_path: Path) -> None:
    """Progress and what is missing on standard error, the sum on standard output, 1 at the end; 0 when all is there."""
    source = fill(tmp_path / "mirror", *NAMES[:3])
    done = fetch("--from", str(source), "--offline")
    assert done.exit_code == 1
    assert done.stdout == f"3 of 4 files of 1 tasks are in {store}\n"
    *progress, missing = done.stderr.splitlines()
    assert [x[: len("files:  25% ")] for x in progress] == [f"files: {x:4.0%} " for x in (0.25, 0.5, 0.75, 1)]
    assert {x.rpartition(" ")[2] for x in progress} == {*NAMES} and "\x1b" not in done.output
    assert missing.startswith(f"missing: {url('four.xlsx')}: ") and missing.endswith("is not in the mirror")
    fill(source, *NAMES)
    done = fetch("--from", str(source), "--offline")
    assert (done.exit_code, done.stdout) == (0, f"4 of 4 files of 1 tasks are in {store}\n")
    assert "missing" not in done.stderr


def test_a_bar_on_a_terminal(store: Path, tmp_path: Path) -> None:
    """Drawn on standard error, where nothing of the plain lines is; the sum stays alone on standard output."""
    source = fill(tmp_path / "mirror", *NAMES)
    here, there = pty.openpty()
    command = [sys.executable, "-m", "drums", "tasks", "fetch", TASK, "--from", str(source), "--offline"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with os.fdopen(here, "rb", buffering=0) as screen:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=there, env=environment)
        finally:
            os.close(there)
        drawn = b""
        with process, suppress(OSError):  # EIO: the other end is closed
            while part := screen.read(1 << 16):
                drawn += part
        assert process.stdout is not None and process.returncode == 0
    assert b"files: " in drawn and b"100%" in drawn and b"\x1b[" in drawn
    assert not any(line.startswith(b"files: 100%") for line in drawn.splitlines())


@pytest.mark.parametrize("jobs", [1, 2])
def test_so_many_files_at_a_time(jobs: int, store: Path, mirror: Mirror) -> None:
    """As `--jobs` says; each answer waits for as many requests, so that fewer would show."""
    mirror.all_here = threading.Barrier(jobs)
    done = fetch("--jobs", str(jobs), "--from", f"http://127.0.0.1:{mirror.server_address[1]}", "--offline")
    assert mirror.most == jobs
    assert done.exit_code == 1 and "3 of 4 files" in done.stdout
    [missing] = [x for x in done.stderr.splitlines() if x.startswith("missing: ")]
    assert url("two.xlsx") in missing and "answered 404" in missing


@pytest.mark.parametrize("jobs", ["0", "33", "x"])
def test_no_such_number_of_jobs(jobs: str, store: Path) -> None:
    done = fetch("--jobs", jobs)
    assert done.exit_code == 2 and "--jobs" in done.stderr


@pytest.mark.parametrize("offline", [(), ("--offline",)])
def test_the_folder_of_the_setting_is_where_files_are(
    offline: tuple[str, ...], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it is there, what is not is missing, and nothing goes where the host would not look for it."""
    folder = fill(tmp_path / "mine", *NAMES[:3])
    digest = "0" * 64
    (folder / "manifest.json").write_text(json.dumps([{"file": "folder/one.xlsx", "size": 8, "sha256": digest}]))
    fill(tmp_path / "osworld" / "file_cache", *NAMES)  # the host does not look there either
    monkeypatch.setenv("DRUMS_FILE_MIRROR", str(folder))
    document: dict[str, Any] = json.loads(fetch("--json", *offline).stdout)
    assert (document["files"], document["store"]) == (4, str(folder))
    assert {*document["missing"]} == {url("one.xlsx"), url("four.xlsx")}
    assert "its manifest.json says 000" in document["missing"][url("one.xlsx")]
    done = fetch(*offline)
    assert (done.exit_code, done.stdout) == (1, f"2 of 4 files of 1 tasks are in {folder}\n")
    assert "files: 100%" in done.stderr and done.stderr.count("missing: ") == 2
    assert not store.exists()
    (folder / "manifest.json").unlink()
    fill(folder, *NAMES)
    assert fetch(*offline).exit_code == 0


def test_another_source_than_the_folder_is_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it brought would never be read."""
    monkeypatch.setenv("DRUMS_FILE_MIRROR", str(fill(tmp_path / "mine", *NAMES)))
    done = fetch("--from", str(fill(tmp_path / "other", *NAMES)))
    assert done.exit_code != 0 and "would not be read" in str(done.exception) and not store.exists()
