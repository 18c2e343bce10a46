"""The host's store of tasks' files: fetched from a server that misbehaves, from a folder, by the command."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner

from drums.cli import cli
from drums.errors import SetupFailed
from drums_core.config import HostConfig
from drums_core.model import SetupStep, Task
from drums_core.task_files import obtain as obtain_module
from drums_core.task_files import store as files
from drums_core.task_files.mirror import read_mirrored
from drums_core.task_files.obtain import have, obtain
from drums_core.task_files.store import FileStore
from drums_osworld.files import urls_of

CONTENT = bytes(range(256)) * 8192  # 2 MiB


class Server(ThreadingHTTPServer):
    """Serves CONTENT in ways that its paths name, and counts what it was asked."""

    asked: Counter[str]
    ranges: list[str]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_GET(self) -> None:
        how = self.path.rpartition("/")[2]
        self.server.asked[how] += 1
        first = self.server.asked[how] == 1
        content = {"empty": b"", "spaced%20name": b"spaced", "other": b"other"}.get(how, CONTENT)
        if how == "absent":
            return self.send_error(404)
        if how == "busy" and first:
            return self.send_error(503)
        start = 0
        if wanted := self.headers.get("Range"):
            self.server.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        content = content[start:]
        # Half of it, and then nothing: once, or always.
        self.wfile.write(content[: len(content) // 2] if (how == "breaks" and first) or how == "always" else content)
        return None

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as found:
        found.asked, found.ranges = Counter(), []
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAUSE_S", 0.01)


def url(server: Server, how: str) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/data/resolve/main/folder/{how}"


def left_in(folder: Path) -> set[str]:
    return {str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file() and x.parent.name != ".sha256"}


async def test_files_come_whole_and_are_known_by_their_hashes(server: Server, tmp_path: Path) -> None:
    wanted = [url(server, x) for x in ("plain", "busy", "breaks", "spaced%20name")]
    store = FileStore(tmp_path / "files")
    assert [x.cause for x in await store.fetch(wanted)] == [""] * 4
    for how in ("plain", "busy", "breaks"):
        assert read_mirrored(store.folder, url(server, how)) == CONTENT
    assert read_mirrored(store.folder, url(server, "spaced%20name")) == b"spaced"
    entries = {x["file"]: x for x in json.loads((store.folder / "manifest.json").read_bytes())}
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert entries["folder/plain"] == {"file": "folder/plain", "size": len(CONTENT), "sha256": digest}
    # The same content is there once.
    places = [store.folder / x for x in ("folder/plain", "folder/busy", f".sha256/{digest}")]
    assert len({os.stat(x).st_ino for x in places}) == 1
    # What broke off went on where it was.
    assert server.ranges == [f"bytes={len(CONTENT) // 2}-"]


async def test_nothing_is_fetched_twice(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        await FileStore(tmp_path).fetch([url(server, "plain")] * 2)
    assert server.asked["plain"] == 1
    (tmp_path / "folder/plain").unlink()
    await FileStore(tmp_path).fetch([url(server, "plain")])
    assert server.asked["plain"] == 2 and (tmp_path / "folder/plain").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("absent", "answered 404"),
        ("empty", "it is empty"),
        ("always", "(tried 3 times)"),
        ("../../../../escape", "leaves the mirror"),
    ],
)
async def test_what_cannot_be_had_is_told_and_leaves_nothing(
    server: Server, tmp_path: Path, how: str, cause: str
) -> None:
    (result,) = await FileStore(tmp_path).fetch([url(server, how)])
    assert cause in result.cause
    assert left_in(tmp_path) == set()
    with pytest.raises(SetupFailed):
        read_mirrored(tmp_path, url(server, how))


async def test_a_file_that_is_too_large_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", len(CONTENT) - 1)
    (result,) = await FileStore(tmp_path).fetch([url(server, "plain")])
    assert "more than the allowed" in result.cause
    assert {x.name for x in (tmp_path / ".sha256").iterdir()} == {".fetching"}


async def test_another_content_than_the_lock_file_has_is_refused(server: Server, tmp_path: Path) -> None:
    await FileStore(tmp_path).fetch([url(server, "plain")])
    (tmp_path / "folder/plain").unlink()
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(hashlib.sha256(CONTENT).hexdigest(), "0" * 64))
    (result,) = await FileStore(tmp_path).fetch([url(server, "plain")])
    assert "manifest.json says 0000" in result.cause and not (tmp_path / "folder/plain").exists()


async def test_files_come_from_a_mirror(server: Server, tmp_path: Path) -> None:
    """A folder, or a base URL: whatever host the task names."""
    task_url = "https://a.example/x/resolve/main/folder/other"
    base = f"http://127.0.0.1:{server.server_address[1]}/"
    assert [x.cause for x in await FileStore(tmp_path / "one").fetch([task_url], source=base)] == [""]
    assert [x.cause for x in await FileStore(tmp_path / "two").fetch([task_url], source=tmp_path / "one")] == [""]
    assert (tmp_path / "two/folder/other").read_bytes() == b"other"
    (result,) = await FileStore(tmp_path / "two").fetch([task_url + "s"], source=tmp_path / "one")
    assert "is not in the mirror" in result.cause


def test_what_a_task_names() -> None:
    def download(*names: str) -> dict[str, Any]:
        return {"files": [{"url": f"https://a.example/{x}", "path": x} for x in names]}

    evaluator = {
        "postconfig": [{"type": "download", "parameters": download("late")}, {"type": "sleep"}],
        "result": {"type": "vm_file", "path": "/home/user/x"},
        "expected": [
            {"type": "cloud_file", "path": ["https://a.example/e", "https://a.example/one"]},
            {"type": "rule"},
        ],
    }
    task = Task("x", "", (SetupStep("download", download("one", "two")),), evaluator, "os", "")
    assert [x.rpartition("/")[2] for x in urls_of([task, task])] == ["one", "two", "late", "e"]


def test_the_command(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is there, one is not: told, and ended with 1; then the host has the one."""
    examples = tmp_path / "osworld" / "evaluation_examples"
    (examples / "examples" / "os").mkdir(parents=True)
    names = ("plain", "absent")
    named = [{"url": url(server, x), "path": f"/home/user/{x}"} for x in names]
    task = {
        "id": "11111111-aaaa",
        "instruction": "",
        "config": [{"type": "download", "parameters": {"files": named}}],
        "evaluator": {"func": "infeasible"},
    }
    (examples / "test_all.json").write_text(json.dumps({"os": [task["id"]]}))
    (examples / "examples/os/11111111-aaaa.json").write_text(json.dumps(task))
    monkeypatch.setenv("DRUMS_OSWORLD", str(tmp_path / "osworld"))
    monkeypatch.setenv("DRUMS_STATE_DIR", str(tmp_path / "state"))
    done = CliRunner().invoke(cli, ["tasks", "fetch", "11111111", "--json"])
    document = json.loads(done.stdout)
    assert done.exit_code == 1 and document["files"] == 2
    assert "answered 404" in document["missing"][url(server, "absent")]
    config = HostConfig(state_dir=tmp_path / "state", osworld=tmp_path / "osworld")
    assert config.file_folders()[0] == tmp_path / "state" / "files"
    assert read_mirrored(config.files, url(server, "plain")) == CONTENT
    done = CliRunner().invoke(cli, ["tasks", "fetch", "--offline"])
    assert done.exit_code != 0 and "nowhere to take files from" in str(done.exception)


# --- as desktops and checkers want them


def host(tmp_path: Path, **settings: Any) -> HostConfig:
    return HostConfig(state_dir=tmp_path / "state", **settings)


async def test_a_file_that_is_not_here_is_fetched_once(server: Server, tmp_path: Path) -> None:
    """However many want it at once; and then it is here."""
    config = host(tmp_path)
    wanted = [url(server, x) for x in ("plain", "other")] * 5
    got: list[bytes] = []

    async def want(one: str) -> None:
        got.append(await obtain(config, one))

    assert not have(config, wanted[0])
    async with trio.open_nursery() as nursery:
        for one in wanted:
            nursery.start_soon(want, one)
    assert sorted(map(len, got)) == [5] * 5 + [len(CONTENT)] * 5
    assert server.asked == {"plain": 1, "other": 1}
    # Of stores that were filled at once, none has lost an entry of another.
    assert {x["file"] for x in json.loads((config.files / "manifest.json").read_bytes())} == {
        "folder/plain",
        "folder/other",
    }
    offline = attrs.evolve(config, files_offline=True)
    assert have(offline, wanted[0]) and await obtain(offline, wanted[0]) == CONTENT


async def test_a_file_comes_from_the_mirror_that_the_host_names(server: Server, tmp_path: Path) -> None:
    task_url = "https://a.example/x/resolve/main/folder/other"
    base = f"http://127.0.0.1:{server.server_address[1]}"
    assert await obtain(host(tmp_path, file_mirror=base), task_url) == b"other"
    with pytest.raises(SetupFailed, match=r"the mirror 'http://127.* answered 404") as info:
        await obtain(host(tmp_path, file_mirror=base), "https://a.example/x/resolve/main/absent")
    assert info.value.url in info.value.message


@pytest.mark.parametrize("settings", [{"files_offline": True}, {"file_mirror": "FOLDER"}])
async def test_a_host_that_fetches_nothing_says_what_is_missing(
    server: Server, tmp_path: Path, settings: dict[str, Any]
) -> None:
    if "file_mirror" in settings:
        settings = {"file_mirror": tmp_path}
    with pytest.raises(SetupFailed, match="is not in the mirror"):
        await obtain(host(tmp_path, **settings), url(server, "plain"))
    assert not server.asked


async def test_what_the_host_has_is_not_asked_for(server: Server, tmp_path: Path) -> None:
    """In the checkout, beside what was fetched; what is there and is wrong is told, and not fetched instead."""
    beside = tmp_path / "osworld" / "file_cache" / "folder"
    beside.mkdir(parents=True)
    (beside / "plain").write_bytes(b"of the checkout")
    (beside / "empty").touch()
    config = host(tmp_path, osworld=tmp_path / "osworld")
    assert await obtain(config, url(server, "other")) == b"other"
    assert await obtain(config, url(server, "plain")) == b"of the checkout"
    with pytest.raises(SetupFailed, match="is empty"):
        await obtain(config, url(server, "empty"))
    assert server.asked == {"other": 1}


async def test_a_want_that_is_cancelled_holds_up_no_other(server: Server, tmp_path: Path) -> None:
    config = host(tmp_path)
    for _ in range(3):
        with trio.move_on_after(0.01):
            await obtain(config, url(server, "plain"))
    with trio.fail_after(10):
        assert await obtain(config, url(server, "plain")) == CONTENT


async def test_a_file_that_takes_too_long_is_told(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obtain_module, "LIMIT_S", 0.01)
    with pytest.raises(SetupFailed, match="not whole after"):
        await obtain(host(tmp_path), url(server, "always"))
