"""The host's store of tasks' files: fetched from a server that misbehaves, from a folder, by the command."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import attrs
import pytest
import trio
from click.testing import CliRunner

from drums.cli import cli
from drums.errors import SetupFailed
from drums_core.config import HostConfig
from drums_core.model import SetupStep, Task
from drums_core.task_files import addresses, mirror
from drums_core.task_files import obtain as obtain_module
from drums_core.task_files import store as files
from drums_core.task_files.mirror import MARK, read_mirrored
from drums_core.task_files.obtain import have, obtain
from drums_core.task_files.store import FileStore
from drums_osworld.files import urls_of

CONTENT = bytes(range(256)) * 8192  # 2 MiB


class Server(ThreadingHTTPServer):
    """Serves CONTENT in ways that its paths name, and counts what it was asked."""

    asked: Counter[str]
    ranges: list[str]
    came: threading.Event


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_GET(self) -> None:
        how = self.path.rpartition("/")[2]
        self.server.asked[how] += 1
        self.server.came.set()
        first = self.server.asked[how] == 1
        content = {"empty": b"", "spaced%20name": b"spaced", "other": b"other"}.get(how, CONTENT)
        if how == "absent":
            return self.send_error(404)
        if how == "busy" and first:
            return self.send_error(503)
        if how in ("away", "round"):
            self.send_response(302)
            self.send_header("Location", self.path.replace("away", "other"))
            self.end_headers()
            with suppress(OSError):
                while how == "round":  # nobody reads it
                    self.wfile.write(CONTENT)
            return None
        if how in ("changes", "lies") and not first:
            content = content[::-1]
        tag = '"1"' if first or how != "changes" else '"2"'
        start = 0
        if (wanted := self.headers.get("Range")) and self.headers.get("If-Range") == tag:
            self.server.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start or how == "part" else 200)
        if start or how == "part":
            begins = 0 if how in ("lies", "part") else start
            end = len(content) - (2 if how == "short" else 1)
            self.send_header("Content-Range", f"bytes {begins}-{end}/{len(content)}")
        if how == "packed":
            self.send_header("Content-Encoding", "gzip")
        if how != "untold":
            self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        content = content[start:]
        # Half of it, and then nothing: once, or always.
        half = (how in ("breaks", "changes", "lies", "untold", "short") and first) or how == "always"
        self.wfile.write(content[: len(content) // 2] if half else content)
        return None

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as found:
        found.asked, found.ranges, found.came = Counter(), [], threading.Event()
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAUSE_S", 0.01)
    monkeypatch.setattr(mirror, "HOSTS", {"127.0.0.1", "a.example"})


def url(server: Server, how: str) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}{MARK}folder/{how}"


async def fetched(folder: Path, *urls: str, **options: Any) -> list[str]:
    """Why each could not be had; from the test's own server, which no public address leads to."""
    return [x.cause for x in await FileStore(folder).fetch(urls, **{"private": True, **options})]


def left_in(folder: Path) -> set[str]:
    return {str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file() and x.parent.name != ".sha256"}


async def test_files_come_whole_and_are_known_by_their_hashes(server: Server, tmp_path: Path) -> None:
    wanted = [url(server, x) for x in ("plain", "busy", "breaks", "spaced%20name")]
    store = FileStore(tmp_path / "files")
    assert await fetched(store.folder, *wanted) == [""] * 4
    for how in ("plain", "busy", "breaks"):
        assert read_mirrored(store.folder, url(server, how)) == CONTENT
    assert read_mirrored(store.folder, url(server, "spaced%20name")) == b"spaced"
    entries = {x["file"]: x for x in json.loads((store.folder / "manifest.json").read_bytes())}
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert entries["folder/plain"] == {
        "file": "folder/plain",
        "size": len(CONTENT),
        "sha256": digest,
        "url": wanted[0],
    }
    # The same content is there once.
    places = [store.folder / x for x in ("folder/plain", "folder/busy", f".sha256/{digest}")]
    assert len({os.stat(x).st_ino for x in places}) == 1
    # What broke off went on where it was.
    assert server.ranges == [f"bytes={len(CONTENT) // 2}-"]


async def test_nothing_is_fetched_twice(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        await fetched(tmp_path, *[url(server, "plain")] * 2)
    assert server.asked["plain"] == 1
    (tmp_path / "folder/plain").unlink()
    await fetched(tmp_path, url(server, "plain"))
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
    (told,) = await fetched(tmp_path, url(server, how))
    assert cause in told
    assert left_in(tmp_path) == set()
    with pytest.raises(SetupFailed):
        read_mirrored(tmp_path, url(server, how))


async def test_a_file_that_is_too_large_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", len(CONTENT) - 1)
    (told,) = await fetched(tmp_path, url(server, "plain"))
    assert "more than the allowed" in told
    assert {x.name for x in (tmp_path / ".sha256").iterdir()} == {".fetching"}


async def test_another_content_than_the_lock_file_has_is_refused(server: Server, tmp_path: Path) -> None:
    await fetched(tmp_path, url(server, "plain"))
    (tmp_path / "folder/plain").unlink()
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(hashlib.sha256(CONTENT).hexdigest(), "0" * 64))
    (told,) = await fetched(tmp_path, url(server, "plain"))
    assert "manifest.json says 0000" in told and not (tmp_path / "folder/plain").exists()


async def test_files_come_from_a_mirror(server: Server, tmp_path: Path) -> None:
    """A folder, or a base URL: whatever host the task names."""
    task_url = f"https://a.example{MARK}folder/other"
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
    monkeypatch.setattr(addresses, "is_public", lambda _: True)
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
    return HostConfig(state_dir=tmp_path / "state", **{"files_private_addresses": True, **settings})


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
    task_url = f"https://a.example{MARK}folder/other"
    base = f"http://127.0.0.1:{server.server_address[1]}"
    assert await obtain(host(tmp_path, file_mirror=base), task_url) == b"other"
    with pytest.raises(SetupFailed, match=r"the mirror 'http://127.* answered 404") as info:
        await obtain(host(tmp_path, file_mirror=base), f"https://a.example{MARK}absent")
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
    """While it fetches, and so has the file to itself."""
    config = host(tmp_path)
    for _ in range(3):
        server.came.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obtain, config, url(server, "always"))
            with trio.fail_after(20):
                await trio.to_thread.run_sync(server.came.wait, 20)
            nursery.cancel_scope.cancel()
    with trio.fail_after(20), pytest.raises(SetupFailed, match="tried 3 times"):
        await obtain(config, url(server, "always"))


async def test_a_file_that_takes_too_long_is_told(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obtain_module, "LIMIT_S", 0.01)
    with pytest.raises(SetupFailed, match="not whole after"):
        await obtain(host(tmp_path), url(server, "always"))


# --- what must not be taken for the file


async def test_a_file_that_changes_while_it_is_fetched_is_of_one_piece(server: Server, tmp_path: Path) -> None:
    """One that the server tells to be another begins anew; so does one of which nothing is told."""
    assert await fetched(tmp_path, url(server, "changes"), url(server, "untold")) == ["", ""]
    assert (tmp_path / "folder/changes").read_bytes() == CONTENT[::-1]
    assert (tmp_path / "folder/untold").read_bytes() == CONTENT
    assert server.ranges == []


async def test_a_part_that_was_not_asked_for_is_not_taken(server: Server, tmp_path: Path) -> None:
    """From another place on, or without being asked; what lied once may give the whole next."""
    told = await fetched(tmp_path, *[url(server, x) for x in ("part", "lies", "packed", "short")])
    assert "another part" in told[0] and told[1] == told[3] == "" and "gzip" in told[2]
    assert (tmp_path / "folder/lies").read_bytes() == CONTENT[::-1]
    assert not (tmp_path / "folder/part").exists() and not (tmp_path / "folder/packed").exists()


async def test_what_was_damaged_is_fetched_again(server: Server, tmp_path: Path) -> None:
    """Shorter, or of the same length."""
    for damage in (CONTENT[:-1], CONTENT[:-1] + b"x"):
        assert await fetched(tmp_path, url(server, "plain")) == [""]
        (tmp_path / "folder/plain").write_bytes(damage)
        assert await fetched(tmp_path, url(server, "plain")) == [""]
        assert read_mirrored(tmp_path, url(server, "plain")) == CONTENT


async def test_no_url_leads_to_this_hosts_own_network(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself or by a redirect; the mirror that the operator has named may be there."""
    port = server.server_address[1]
    own = [url(server, "other"), f"http://localhost:{port}/other", f"http://[::1]:{port}/other", "http://10.0.0.1/x"]
    told = await fetched(tmp_path, *own, private=False)
    assert all("which is not public" in x for x in told) and not server.asked
    assert await fetched(tmp_path, url(server, "away")) == [""]

    # A name that stood for another address when it was looked at: the connection tells.
    monkeypatch.setattr(files, "require_public_name", AsyncMock())
    (cause,) = await fetched(tmp_path / "two", url(server, "other"), private=False)
    assert "which is not public" in cause and not (tmp_path / "two/folder/other").exists()
    # A redirect.
    monkeypatch.undo()
    monkeypatch.setattr(mirror, "HOSTS", {"127.0.0.1"})
    real = addresses.require_public_name

    async def let_the_first_pass(request: Any) -> None:
        if not str(request.url).endswith("away"):
            await real(request)

    monkeypatch.setattr(files, "require_public_name", let_the_first_pass)
    monkeypatch.setattr(files, "require_public_peer", lambda _: None)
    (cause,) = await fetched(tmp_path / "three", url(server, "away"), private=False)
    assert "which is not public" in cause


async def test_what_is_no_url_is_told_as_a_file_that_cannot_be_had(tmp_path: Path) -> None:
    wrong = [
        "http://a.example/\x07",
        "http://a b.example/x",
        "ftp://a.example/x",
        "http:///x",
        "http://a.example/\ud800",
        "",
    ]
    assert all(await fetched(tmp_path, *wrong))
    for one in wrong:
        with pytest.raises(SetupFailed, match="cannot be had"):
            await obtain(host(tmp_path, files_offline=True), one)


async def test_credentials_are_not_told(server: Server, tmp_path: Path) -> None:
    port = server.server_address[1]
    for settings, one in (
        (
            {"file_mirror": f"http://me:secret@127.0.0.1:{port}"},
            f"https://a.example{MARK}absent",
        ),
        ({}, f"http://me:secret@127.0.0.1:{port}/absent"),
        ({"files_offline": True}, "https://me:secret@a.example/absent"),
        # Passwords with an `@`, a `/` or a `#` in them: no URL has these last, but operators and authors may write it.
        ({}, f"http://me:x@secret@127.0.0.1:{port}/absent"),
        ({}, f"http://me:secret/x@127.0.0.1:{port}/absent"),
        ({"files_offline": True}, f"http://me:secret#x@127.0.0.1:{port}/absent"),
        ({"file_mirror": f"http://me:secret/x@127.0.0.1:{port}"}, f"https://a.example{MARK}absent"),
    ):
        with pytest.raises(SetupFailed) as info:
            await obtain(host(tmp_path, **settings), one)
        assert "secret" not in str(info.value) and "secret" not in json.dumps(info.value.facts)


async def test_a_full_disk_is_told(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FREE_BYTES", 1 << 60)
    (told,) = await fetched(tmp_path, url(server, "plain"))
    assert "MiB free" in told and not server.asked


async def test_parts_of_long_ago_are_removed(server: Server, tmp_path: Path) -> None:
    assert await fetched(tmp_path, url(server, "always")) != [""]
    (part,) = (tmp_path / ".sha256").glob("*.part")
    os.utime(part, (1, 1))
    await fetched(tmp_path, url(server, "plain"))
    assert not part.exists()


async def test_a_redirect_that_never_ends_is_told(server: Server, tmp_path: Path) -> None:
    """Its body is not read, however long it is."""
    (told,) = await fetched(tmp_path, url(server, "round"))
    assert "more than 10 times" in told


async def test_what_was_damaged_is_fetched_again_where_it_is_wanted(server: Server, tmp_path: Path) -> None:
    config = host(tmp_path)
    assert await obtain(config, url(server, "plain")) == CONTENT
    (config.files / "folder/plain").write_bytes(b"damaged")
    with pytest.raises(SetupFailed, match="sha256"):
        await obtain(attrs.evolve(config, files_offline=True), url(server, "plain"))
    assert await obtain(config, url(server, "plain")) == CONTENT


async def test_a_store_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = await fetched(tmp_path / "file" / "store", "http://a.example/x", "http://a.example/y")
    assert len(told) == 2 and all("Not a directory" in x for x in told)
