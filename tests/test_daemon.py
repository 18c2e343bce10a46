"""The daemon over a real port, with real desktops: every route, bad input, clients that leave, and its own end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import attrs
import psutil
import pytest
from requires import requires
from scratch import scratch_state
from snapshot import assert_unchanged, take
from test_openapi import DOCUMENT, schema_errors

from drums_core.config import HostConfig
from drums_core.journal import NOT_WATCHED, read_episode, read_episodes

pytestmark = requires("root", "criu")
TASK = "2e208cb7"
MAX_SLOTS = 4


@attrs.frozen
class Reply:
    """An answer."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.content)

    def refused(self, status: int, code: str) -> dict[str, Any]:
        """The problem document, when this is that refusal."""
        assert self.status == status, self.content[:500]
        document: dict[str, Any] = self.json
        assert self.headers["content-type"] == "application/problem+json"
        assert document["code"] == code and document["status"] == status and document["detail"], document
        assert schema_errors("Problem", document) == []
        return document


@attrs.define
class Running:
    """A daemon in a process of its own."""

    config: HostConfig
    process: subprocess.Popen[str]
    port: int
    token: str

    def connect(self, timeout_s: float = 60.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, token: str | None = ""
    ) -> Reply:
        """One request; `body` is bytes or JSON; `token` None sends none."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        fields = dict(headers or {})
        if token is not None:
            fields["Authorization"] = f"Bearer {token or self.token}"
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, content, fields)
            response = connection.getresponse()
            lines = {k.lower(): v for k, v in response.getheaders()}
            return Reply(response.status, lines, response.read())

    def good(self, method: str, path: str, body: Any = None, *, status: int = 200, **more: Any) -> Any:
        """The JSON of an answer that must be this success, and be what the OpenAPI document says."""
        reply = self.call(method, path, body, **more)
        assert reply.status == status, (method, path, reply.content[:1000])
        route = next(p for p in DOCUMENT["paths"] if _matches(p, path) and method.lower() in DOCUMENT["paths"][p])
        said = DOCUMENT["paths"][route][method.lower()]["responses"][str(status)]
        schema = said.get("content", {}).get("application/json", {}).get("schema")
        if schema is None:
            return reply.content
        assert schema_errors(schema["$ref"].rpartition("/")[2], reply.json) == [], route
        return reply.json

    def create(self, **body: Any) -> str:
        """A new desktop's slot."""
        slot: str = self.good("POST", "/v1/slots", body, status=201)["id"]
        return slot

    @contextlib.contextmanager
    def slot(self, **body: Any) -> Iterator[str]:
        """A desktop for a block."""
        slot = self.create(**body)
        try:
            yield f"/v1/slots/{slot}"
        finally:
            self.call("DELETE", f"/v1/slots/{slot}")

    def slots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.good("GET", "/v1/slots")["slots"]
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, and wait for its end."""
        self.process.send_signal(number)
        return self.process.wait(60)


def _matches(template: str, path: str) -> bool:
    parts, given = template.split("/"), path.partition("?")[0].split("/")
    return len(parts) == len(given) and all(a == b or a.startswith("{") for a, b in zip(parts, given, strict=True))


def _drain(pipe: IO[str]) -> None:
    with pipe:
        pipe.read()


@contextlib.contextmanager
def running(config: HostConfig, *options: str) -> Iterator[Running]:
    """A daemon on a free port; killed at the end if it still runs."""
    argv = [sys.executable, "-c", "from drums.cli import main; main()", "serve", "--port", "0", "--json"]
    argv += ["--state-dir", str(config.state_dir), "--max-slots", str(MAX_SLOTS), *options]
    log = config.state_dir.parent / f"{config.state_dir.name}.log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DRUMS_")}
    with open(log, "w") as errors:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                ready = json.loads(line)
                break
        else:
            raise AssertionError(f"the daemon did not start: {log.read_text()}")
        # Nothing must wait for a reader.
        threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
        token = Path(ready["token_file"]).read_text().strip()
        yield Running(config, process, int(ready["url"].rpartition(":")[2]), token)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        log.unlink()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """A daemon for the tests of this module; at the end it stops in order, and nothing is left."""
    with scratch_state() as config, running(config) as found:
        yield found
        assert found.stop() == 0
        assert os.listdir(config.state_dir / "slots") == [] and os.listdir(config.state_dir / "run") == []


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- every route


def test_a_life(daemon: Running) -> None:
    """Create, wait, step, verify, fork, files, reset, save, quarantine, release, close: as the contract says."""
    labels = {"policy": "a life's"}
    with daemon.slot(task=TASK, ttl=600, labels=labels) as path:
        slot = daemon.good("GET", path)
        assert (slot["state"], slot["ttl"], slot["image"], slot["labels"]) == ("up", 600.0, "minimal", labels)
        assert 500 < slot["expires_in"] <= 600
        assert slot["task"].startswith(TASK) and slot["verdict"] == "pending"
        report = daemon.good("POST", f"{path}/wait", {"timeout": 20})
        assert report["validity"]["verdict"] == "valid", report
        assert daemon.good("GET", f"{path}/gates")["episode"] == slot["episode"]
        first = daemon.good("POST", f"{path}/verify", {})
        assert (first["score"], first["valid"], first["verdict"]) == (0.0, True, "valid"), first
        assert first["provenance"]["episode"] == slot["episode"]
        done = daemon.good("POST", f"{path}/step", {"action": "print('hello'); import os; os.chdir('/')"})
        assert (done["status"], done["returncode"], done["output"].strip()) == ("success", 0, "hello")
        assert daemon.good("POST", f"{path}/step", {"action": "DONE"})["status"] == "success"
        rename = "mv ~/Desktop/minutes_draft ~/Desktop/minutes_final"
        ran = daemon.good("POST", f"{path}/execute", {"command": rename, "shell": True})
        assert ran == {"returncode": 0, "output": "", "error": ""}
        content = random.Random(7).randbytes(300_000)
        assert daemon.good("PUT", f"{path}/files?path=/tmp/a%20b/%E2%82%AC", content, status=204) == b""
        assert daemon.call("GET", f"{path}/files?path=/tmp/a%20b/%E2%82%AC").content == content
        shot = daemon.call("GET", f"{path}/screenshot")
        assert shot.headers["content-type"] == "image/png" and shot.content.startswith(b"\x89PNG")
        assert daemon.good("GET", f"{path}/accessibility")["AT"].startswith("<desktop-frame ")
        children = daemon.good("POST", f"{path}/fork", {"n": 2})["slots"]
        assert len(children) == 2 and {c["state"] for c in children} == {"up"}
        assert [c["labels"] for c in children] == [labels] * 2
        with ThreadPoolExecutor() as pool:
            paths = [path, *(f"/v1/slots/{c['id']}" for c in children)]
            rewards = list(pool.map(lambda p: daemon.good("POST", f"{p}/verify", {}), paths))
        assert [(r["score"], r["valid"]) for r in rewards] == [(1.0, True)] * 3, [r["checker_error"] for r in rewards]
        reverify = f"/v1/episodes/{slot['episode']}/reverify"
        daemon.call("POST", reverify, {}).refused(404, "end_state_not_found")
        daemon.call("POST", f"{path}/verify", {"keep": True, "in_place": True}).refused(422, "config_error")
        assert daemon.good("POST", f"{path}/verify", {"keep": True})["provenance"]["graded"]["kept"] is True
        again = daemon.good("POST", reverify, {})
        assert (again["agree"], again["recorded"]["score"], again["again"]["score"]) == (True, 1.0, 1.0), again
        (end_state,) = [c for c in daemon.good("GET", "/v1/checkpoints")["checkpoints"] if c["kind"] == "end_state"]
        assert (end_state["id"], end_state["name"]) == (again["checkpoint"], slot["episode"])
        daemon.call("POST", "/v1/slots", {"checkpoint": end_state["id"]}).refused(409, "checkpoint_error")
        assert daemon.good("DELETE", f"/v1/checkpoints/{slot['episode']}", status=204) == b""
        daemon.call("POST", reverify, {"anyway": True}).refused(404, "end_state_not_found")
        for child in children:
            assert daemon.good("DELETE", f"/v1/slots/{child['id']}", status=204) == b""
        saved = daemon.good("POST", f"{path}/save", {"name": "kept"})["checkpoint"]
        assert saved["name"] == "kept" and saved["size_bytes"] > 1 << 20 and saved["task"] == slot["task"]
        assert "kept" in [c["name"] for c in daemon.good("GET", "/v1/checkpoints")["checkpoints"]]
        with daemon.slot(checkpoint="kept") as again:
            assert daemon.good("GET", again)["task"] == slot["task"]
        assert daemon.good("DELETE", "/v1/checkpoints/kept", status=204) == b""
        daemon.call("DELETE", "/v1/checkpoints/kept").refused(404, "checkpoint_not_found")
        fresh = daemon.good("POST", f"{path}/reset", {})
        assert fresh["episode"] != slot["episode"] and fresh["state"] == "up"
        assert daemon.good("POST", f"{path}/extend", {"ttl": None})["expires_in"] is None
        broken = daemon.good("POST", f"{path}/quarantine", {"reason": "a broken page"})
        assert (broken["state"], broken["reason"], broken["verdict"]) == ("quarantined", "a broken page", "invalid")
        skipped = daemon.good("POST", f"{path}/verify", {})
        assert (skipped["score"], skipped["valid"]) == (None, False) and "a broken page" in skipped["checker_skipped"]
        daemon.call("POST", f"{path}/step", {"action": "WAIT"}).refused(409, "slot_quarantined")
        daemon.call("POST", f"{path}/reset", {}).refused(409, "slot_quarantined")
        assert daemon.good("POST", f"{path}/release")["state"] == "down"
        daemon.call("POST", f"{path}/step", {"action": "WAIT"}).refused(409, "invalid_transition")
        assert daemon.good("POST", f"{path}/reset")["state"] == "up"
    daemon.call("GET", path).refused(404, "slot_not_found")
    daemon.call("POST", f"{path}/step", {"action": "WAIT"}).refused(404, "slot_not_found")

    listed = daemon.good("GET", "/v1/episodes?limit=1000")["episodes"]
    mine = [e for e in listed if e["slot"] == slot["id"]]
    assert [e["origin"] for e in mine] == ["reset", "reset", "create"] and all(e["ended_at"] for e in mine)
    assert [e["labels"] for e in mine] == [labels] * 3
    (row,) = [r for r in daemon.good("GET", "/v1/stats?by=label")["rows"] if r["label"] == "a life's"]
    assert (row["episodes"], row["rewards"], row["invalid"]) == (5, 4, 1)  # three of its own, two of its children
    assert {"gate": "not_quarantined", "cause": "infrastructure", "episodes": 1} in row["failures"]
    pairs = daemon.good("GET", "/v1/stats?since=1")["rows"]
    assert [r["task"] for r in pairs if r["label"] == "a life's"] == [slot["task"]]
    episode = daemon.good("GET", f"/v1/episodes/{slot['episode']}")
    assert [r["score"] for r in episode["rewards"]] == [0.0, 1.0, 1.0] and episode["verdict"] == "valid"
    assert daemon.good("GET", f"/v1/episodes/{fresh['episode']}")["quarantines"][0]["reason"] == "a broken page"
    assert {g["gate"] for g in episode["gates"]} >= {"state_hash", "alive_after_resume"}
    page = daemon.good("GET", f"/v1/episodes?limit=1&before={mine[0]['id']}")["episodes"]
    assert len(page) == 1 and page[0]["id"] != mine[0]["id"]


def test_what_the_host_has(daemon: Running) -> None:
    """Health, tasks, plugins, images, metrics, and the document."""
    health = daemon.good("GET", "/v1/health")
    assert health["status"] == "ok" and health["max_slots"] == MAX_SLOTS and health["instance"].startswith("h-")
    assert set(daemon.call("GET", "/v1/health", token=None).json) == {"status", "version"}
    tasks = daemon.good("GET", "/v1/tasks")
    assert tasks["broken"] == {} and all(t["supported"] for t in tasks["tasks"])
    task = daemon.good("GET", f"/v1/tasks/{TASK}")
    assert task in tasks["tasks"] and task["instruction"] and task["evaluator"]["func"]
    plugins = {p["name"]: p for p in daemon.good("GET", "/v1/plugins")["plugins"]}
    assert plugins["state_hash"]["ok"] and plugins["osworld_checker"]["distribution"] == "drums"
    again = {p["name"]: p for p in daemon.good("POST", "/v1/plugins/reload", {})["plugins"]}
    assert again == plugins and len(plugins["state_hash"]["sha256"]) == 64 and plugins["state_hash"]["note"] == ""
    images = daemon.good("GET", "/v1/images")["images"]
    assert [i["name"] for i in images] == ["minimal"] and images[0]["current"]
    assert daemon.call("GET", "/openapi.json", token=None).json == json.loads(json.dumps(DOCUMENT))
    text = daemon.call("GET", "/metrics").content.decode()
    for line in ("drums_slots_allowed 4.0", 'drums_slots{state="up"}', 'drums_episodes_total{origin="create"}'):
        assert line in text, text
    daemon.call("GET", "/metrics", token=None).refused(401, "unauthorized")


def test_the_page_to_watch_desktops(daemon: Running) -> None:
    """Its three files are open, hold no secret and may run and reach nothing but themselves and this daemon."""
    page, script, style = (daemon.call("GET", path, token=None) for path in ("/", "/watch.js", "/watch.css"))
    for reply, kind in ((page, "text/html"), (script, "text/javascript"), (style, "text/css")):
        assert reply.status == 200 and reply.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert daemon.token.encode() not in reply.content
    assert re.findall(rb"<script[^>]*>", page.content) == [b'<script src="/watch.js" defer>']
    made = set(re.findall(rb'id="(\w+)"', page.content))
    wanted = set(re.findall(rb'\$\("#(\w+)', script.content))
    assert wanted and wanted <= made
    # What a desktop or a task says goes in as text only.
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script.content)
    routes = {f"/v1/{name}" for name in ("health", "slots", "episodes", "tasks")}
    asked = {m.decode() for m in re.findall(rb'[`"](/v1/\w+)', script.content)}
    assert asked == routes and all(daemon.call("GET", path).status == 200 for path in asked)


def events_of(reply: Reply) -> list[tuple[str, Any]]:
    """The events of a stream that has ended."""
    assert reply.headers["content-type"] == "text/event-stream"
    found = []
    for block in reply.content.decode().split("\n\n"):
        if block.startswith("event: "):
            kind, _, data = block.removeprefix("event: ").partition("\ndata: ")
            found.append((kind, json.loads(data)))
    return found


def test_progress_is_streamed(daemon: Running) -> None:
    """A long call tells its progress, then its result with status and body, or its problem."""
    stream = {"Accept": "text/event-stream"}
    reply = daemon.call("POST", "/v1/slots", {"task": TASK}, headers=stream)
    events = events_of(reply)
    kind, last = events[-1]
    assert (reply.status, kind, last["status"]) == (200, "result", 201)
    path = f"/v1/slots/{last['body']['id']}"
    try:
        assert {k for k, _ in events[:-1]} == {"progress"}
        assert {e["slot"] for _, e in events[:-1]} == {last["body"]["id"]}
        states = [e["data"]["state"] for _, e in events[:-1] if e["kind"] == "slot_state"]
        assert states == ["starting", "up"]
        verify = events_of(daemon.call("POST", f"{path}/verify", {}, headers=stream))
        assert verify[-1][0] == "result" and verify[-1][1]["body"]["valid"] is True
        assert "verdict" in [e["kind"] for _, e in verify[:-1]]
        problem = events_of(daemon.call("POST", f"{path}/save", {"name": "golden"}, headers=stream))[-1]
        if problem[0] == "problem":
            assert problem[1]["code"] == "checkpoint_error"
        else:
            daemon.call("DELETE", "/v1/checkpoints/golden")
    finally:
        daemon.call("DELETE", path)
    assert events_of(daemon.call("POST", f"{path}/reset", {}, headers=stream))[-1][1]["code"] == "slot_not_found"
    daemon.call("POST", "/v1/slots", {"nope": 1}, headers=stream).refused(422, "config_error")


def test_events_of_a_slot_end_with_it(daemon: Running) -> None:
    """`/events` of a slot tells what happens to it, and ends when it closes."""
    with daemon.slot() as path, contextlib.closing(daemon.connect()) as connection:
        connection.request("GET", f"{path}/events", headers={"Authorization": f"Bearer {daemon.token}"})
        response = connection.getresponse()
        assert response.readline() == b": listening\n"
        daemon.good("POST", f"{path}/quarantine", {"reason": "why"})
        daemon.call("DELETE", path)
        events = events_of(Reply(200, {"content-type": "text/event-stream"}, response.read()))
    assert [e["data"]["state"] for k, e in events if k == "slot_state"] == ["quarantined", "closed"]
    assert "verdict" in [k for k, _ in events]


def test_idempotency(daemon: Running) -> None:
    """The same key and request get the same answer, at once or later, and act once; another request is a conflict."""
    key = {"Idempotency-Key": "create-1"}
    with ThreadPoolExecutor() as pool:
        replies = list(pool.map(lambda _: daemon.call("POST", "/v1/slots", {"ttl": 300}, headers=key), range(3)))
    ids = {r.json["id"] for r in replies}
    assert len(ids) == 1 and {r.status for r in replies} == {201}
    path = f"/v1/slots/{ids.pop()}"
    try:
        daemon.call("POST", "/v1/slots", {"ttl": 301}, headers=key).refused(409, "idempotency_conflict")
        step = {"Idempotency-Key": "step-1"}
        action = {"action": "open('/tmp/count', 'a').write('x'); print(len(open('/tmp/count').read()))"}
        one, two = (daemon.call("POST", f"{path}/step", action, headers=step).json for _ in range(2))
        assert one == two and one["output"].strip() == "1"
        # A caller that leaves finds its step done, once.
        slow = {"action": "import time; time.sleep(1); open('/tmp/count', 'a').write('y')"}
        with contextlib.closing(daemon.connect(0.3)) as connection:
            fields = {"Authorization": f"Bearer {daemon.token}", "Idempotency-Key": "step-2"}
            connection.request("POST", f"{path}/step", json.dumps(slow), fields)
            with pytest.raises(TimeoutError):
                connection.getresponse()
        assert daemon.call("POST", f"{path}/step", slow, headers={"Idempotency-Key": "step-2"}).json["returncode"] == 0
        assert daemon.call("GET", f"{path}/files?path=/tmp/count").content == b"xy"
        # What was refused without having done anything is tried anew.
        bad = {"Idempotency-Key": "bad-1"}
        daemon.call("POST", f"{path}/step", {"actoin": "WAIT"}, headers=bad).refused(422, "config_error")
        assert daemon.call("POST", f"{path}/step", {"action": "WAIT"}, headers=bad).status == 200
        daemon.call("POST", f"{path}/step", action, headers={"Idempotency-Key": "a b"}).refused(422, "config_error")
    finally:
        daemon.call("DELETE", path)


# --- bad input


@pytest.fixture(scope="module")
def spare(daemon: Running) -> Iterator[str]:
    """A desktop that bad input is aimed at."""
    with daemon.slot() as path:
        yield path


def test_an_unknown_field(daemon: Running) -> None:
    """Every wrong place is named, and nothing starts."""
    document = daemon.call("POST", "/v1/slots", {"tsk": 1, "ttl": "x"}).refused(422, "config_error")
    assert {e["path"] for e in document["errors"]} == {"$.tsk", "$.ttl"}


def test_a_wrong_type(daemon: Running, spare: str) -> None:
    """A number where text belongs."""
    document = daemon.call("POST", f"{spare}/step", {"action": 5}).refused(422, "config_error")
    assert document["errors"] == [{"path": "$.action", "message": "expected string, got integer"}]


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"action": NaN}', b"\xff\xfe", b"[" * 50_000], ids=repr)
def test_malformed_json(daemon: Running, spare: str, body: bytes) -> None:
    """What is no JSON object is told as that."""
    daemon.call("POST", f"{spare}/step", body).refused(400, "malformed_json")


@pytest.mark.parametrize("name", ["x" * 65, "x" * 10_000, "", "../x", "a\0b"], ids=lambda n: repr(n)[:12])
def test_a_name_that_is_none(daemon: Running, spare: str, name: str) -> None:
    """Too long, empty, or with characters that names do not have."""
    document = daemon.call("POST", f"{spare}/save", {"name": name}).refused(422, "config_error")
    assert [e["path"] for e in document["errors"]] == ["$.name"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/slots/d-000000000000", 404, "slot_not_found"),
        ("DELETE", "/v1/slots/d-000000000000", 404, "slot_not_found"),
        ("POST", "/v1/slots/d-000000000000/verify", 404, "slot_not_found"),
        ("GET", f"/v1/slots/{'x' * 5000}", 404, "slot_not_found"),
        ("GET", "/v1/slots/%00%ff/screenshot", 404, "slot_not_found"),
        ("GET", "/v1/tasks/00000000", 404, "task_not_found"),
        ("GET", "/v1/tasks/2e2", 404, "task_not_found"),
        ("GET", "/v1/episodes/e-none", 404, "episode_not_found"),
        ("POST", "/v1/episodes/e-none/reverify", 404, "episode_not_found"),
        ("GET", "/v1/episodes?before=e-none", 404, "episode_not_found"),
        ("GET", "/v1/episodes?limit=x", 422, "config_error"),
        ("GET", "/v1/episodes?limt=1", 422, "config_error"),
        ("DELETE", "/v1/checkpoints/none", 404, "checkpoint_not_found"),
        ("GET", "/v2/slots", 404, "not_found"),
        ("GET", "/v1/slots/", 404, "not_found"),
        ("PUT", "/v1/slots", 405, "method_not_allowed"),
        ("BREW", "/v1/slots", 405, "method_not_allowed"),
        ("HEAD", "/v1/events", 405, "method_not_allowed"),
    ],
)
def test_what_is_not_there(daemon: Running, method: str, path: str, status: int, code: str) -> None:
    """Each has its status and code."""
    reply = daemon.call(method, path)
    if method == "HEAD":
        assert reply.status == status
    else:
        reply.refused(status, code)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"task": "00000000"}, 404, "task_not_found"),
        ({"image": "none"}, 404, "image_not_found"),
        ({"checkpoint": "none"}, 409, "checkpoint_error"),
        ({"image": "minimal", "checkpoint": "none"}, 422, "config_error"),
        ({"network": "nat"}, 422, "config_error"),
        ({"labels": {"drums": "selftest"}}, 422, "config_error"),
        ({"ttl": -1}, 422, "config_error"),
    ],
    ids=str,
)
def test_a_create_that_is_refused(daemon: Running, body: dict[str, Any], status: int, code: str) -> None:
    """With its reason, and without a slot."""
    before = len(daemon.slots())
    daemon.call("POST", "/v1/slots", body).refused(status, code)
    assert len(daemon.slots()) == before


def test_bad_calls_of_a_desktop(daemon: Running, spare: str) -> None:
    """What the desktop refuses is the caller's error, not the daemon's."""
    daemon.call("POST", f"{spare}/execute", {"command": "'unbalanced"}).refused(422, "config_error")
    daemon.call("POST", f"{spare}/execute", {"command": []}).refused(422, "config_error")
    daemon.call("GET", f"{spare}/files?path=/tmp/none").refused(404, "file_not_found")
    daemon.call("GET", f"{spare}/files?path=/tmp").refused(409, "file_unsuitable")
    daemon.call("PUT", f"{spare}/files?path=/etc/passwd", b"x").refused(409, "file_unsuitable")
    daemon.call("GET", f"{spare}/files").refused(422, "config_error")
    daemon.call("POST", f"{spare}/verify", {}).refused(409, "invalid_transition")  # it has no task
    daemon.call("POST", f"{spare}/release").refused(409, "invalid_transition")
    raised = daemon.good("POST", f"{spare}/step", {"action": "raise SystemError('x')"})
    assert raised["status"] == "error" and "SystemError" in raised["error"]


def test_two_operations_at_once(daemon: Running, spare: str) -> None:
    """The second is told that the first is under way, and which."""
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(daemon.call, "POST", f"{spare}/execute", {"command": "sleep 2"})
        time.sleep(0.5)
        document = daemon.call("POST", f"{spare}/step", {"action": "WAIT"}).refused(409, "slot_busy")
        assert "execute" in document["detail"] and document["hint"]
        assert slow.result().json["returncode"] == 0


def test_beyond_capacity(daemon: Running) -> None:
    """A create or a fork too many is refused with how many there may be, and starts nothing."""
    made = []
    try:
        while len(daemon.slots()) < MAX_SLOTS:
            made.append(daemon.create())
        document = daemon.call("POST", "/v1/slots", {}).refused(503, "capacity_exhausted")
        assert document["facts"] == {"wanted": 1, "free": 0, "allowed": MAX_SLOTS}
        daemon.call("POST", f"/v1/slots/{made[0]}/fork", {"n": 1}).refused(503, "capacity_exhausted")
        assert len(daemon.slots()) == MAX_SLOTS
    finally:
        for slot in made:
            daemon.call("DELETE", f"/v1/slots/{slot}")


@pytest.mark.parametrize("token", [None, "drums_sk_wrong", "é", "x" * 10_000], ids=["none", "wrong", "latin", "long"])
@pytest.mark.parametrize("path", ["/v1/slots", "/v1/nothing", "/metrics", "/nothing"])
def test_a_wrong_or_missing_token(daemon: Running, token: str | None, path: str) -> None:
    """Nothing but the minimal health is answered, not even whether a route is there."""
    reply = daemon.call("GET", path, token=token)
    reply.refused(401, "unauthorized")
    assert reply.headers["www-authenticate"].startswith("Bearer")


def test_a_wrong_token_of_health(daemon: Running) -> None:
    """It is told, so that a client learns early."""
    daemon.call("GET", "/v1/health", token="drums_sk_wrong").refused(401, "unauthorized")


def test_another_scheme(daemon: Running) -> None:
    """The token counts as a bearer token alone."""
    fields = {"Authorization": f"Basic {daemon.token}"}
    daemon.call("GET", "/v1/slots", headers=fields, token=None).refused(401, "unauthorized")


GIGABYTE = 1 << 30


@pytest.mark.parametrize("way", ["declared", "chunked", "without a token"])
def test_a_body_of_a_gigabyte(daemon: Running, spare: str, way: str) -> None:
    """Refused long before it has come, and the daemon does not keep it."""
    before = psutil.Process(daemon.process.pid).memory_info().rss
    sent = 0
    with contextlib.closing(socket.create_connection(("127.0.0.1", daemon.port), timeout=30)) as sock:
        head = f"PUT {spare}/files?path=/tmp/big HTTP/1.1\r\nHost: x\r\n"
        if way != "without a token":
            head += f"Authorization: Bearer {daemon.token}\r\n"
        chunked = way == "chunked"
        head += "Transfer-Encoding: chunked\r\n\r\n" if chunked else f"Content-Length: {GIGABYTE}\r\n\r\n"
        sock.sendall(head.encode())
        block = b"x" * (1 << 20)
        piece = b"%x\r\n%s\r\n" % (len(block), block) if chunked else block
        with contextlib.suppress(OSError):
            while sent < GIGABYTE:
                sock.sendall(piece)
                sent += len(block)
        answer = b""
        with contextlib.suppress(OSError):
            while part := sock.recv(65536):
                answer += part
    code = b"401" if way == "without a token" else b"413"
    assert answer.startswith(b"HTTP/1.1 " + code), (answer[:200], sent)
    assert sent < GIGABYTE
    after = psutil.Process(daemon.process.pid).memory_info().rss
    assert after - before < 150 << 20, (before, after)
    assert daemon.good("GET", "/v1/health")["status"] == "ok"


def nonsense(seed: int) -> bytes:
    """Something that a confused or hostile client may say."""
    rng = random.Random(seed)
    noise = rng.randbytes(rng.randrange(1, 3000))
    upgrade = b"GET /v1/slots HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: "
    websocket = b"websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    choices = [
        noise,
        b"",
        b"GET",
        b"GET / HTTP/1.1\r\nHost: x\r\n",  # and never goes on
        b"GET / HTTP/1.1\r\n\r\n" + noise,
        b"GET /v1/slots HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"POST /v1/slots HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/slots HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/slots HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + noise,
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000,
        upgrade + websocket + b"\x81\xff" + noise,
        upgrade + b"h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n" + noise,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise,
        b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n" * 50,
        b"CONNECT example.org:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise,  # TLS
        b"GET /%ff%00/../.. HTTP/1.0\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n",
    ]
    return choices[seed % len(choices)]


def test_400_connections_that_say_nonsense(daemon: Running) -> None:
    """All at once, half of them left open: the daemon answers the next request, and is at rest when they are gone."""
    process = psutil.Process(daemon.process.pid)
    descriptors = process.num_fds()
    held = []
    for seed in range(400):
        sock = socket.create_connection(("127.0.0.1", daemon.port), timeout=5)
        held.append(sock)
        with contextlib.suppress(OSError):
            sock.sendall(nonsense(seed))
        if seed % 4 == 0:  # an abrupt end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if seed % 2 == 0:
            sock.close()
    for sock in held:
        sock.close()
    assert eventually(lambda: process.num_fds() <= descriptors, 20), (descriptors, process.num_fds())
    assert daemon.good("GET", "/v1/health")["status"] == "ok"
    time.sleep(0.3)
    began, used = time.monotonic(), sum(process.cpu_times()[:2])
    time.sleep(1.0)
    assert (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began) < 0.2
    with daemon.slot() as path:
        assert daemon.good("POST", f"{path}/step", {"action": "WAIT"})["returncode"] == 0


def test_too_many_connections(daemon: Running) -> None:
    """One more than the limit is told so; when others leave, there is room again."""
    held: list[socket.socket] = []
    try:
        for _ in range(daemon.config.max_connections + 5):
            held.append(socket.create_connection(("127.0.0.1", daemon.port), timeout=5))
        daemon.call("GET", "/v1/health").refused(503, "connection_limit")
    finally:
        for sock in held:
            sock.close()
    assert eventually(lambda: daemon.call("GET", "/v1/health").status == 200)


def test_an_idle_connection_is_closed(daemon: Running) -> None:
    """One that never ends its request's head does not hold a place for ever."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", daemon.port), timeout=30)) as sock:
        sock.sendall(b"GET /v1/health HTTP/1.1\r\nHost")
        began = time.monotonic()
        assert sock.recv(100) == b"" and 5 < time.monotonic() - began < 25


# --- clients that leave


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_leaves_during_create(daemon: Running, spare: str, after_s: float, stream: bool) -> None:
    """Nothing of its desktop is left: no slot, process, mount, cgroup or folder."""
    before = take(daemon.config.state_dir, descriptors=False, processes=False)
    count = len(daemon.slots())
    body = json.dumps({"task": TASK})
    head = f"POST /v1/slots HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {daemon.token}\r\n"
    head += "Accept: text/event-stream\r\n" if stream else ""
    with contextlib.closing(socket.create_connection(("127.0.0.1", daemon.port), timeout=30)) as sock:
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(after_s)
        sock.setblocking(False)
        answer = b""
        with contextlib.suppress(BlockingIOError):
            answer = sock.recv(1 << 20)
    if made := re.search(rb'"id":"(d-\w+)","state":"up"', answer):  # it was told before it left
        daemon.call("DELETE", f"/v1/slots/{made[1].decode()}")
    assert eventually(lambda: len(daemon.slots()) == count), daemon.slots()
    time.sleep(0.3)
    assert len(daemon.slots()) == count
    assert_unchanged(before, daemon.config.state_dir, descriptors=False, processes=False)


def test_a_client_that_leaves_during_reset(daemon: Running) -> None:
    """The slot is down and can be reset again."""
    with daemon.slot(task=TASK) as path:
        head = f"POST {path}/reset HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {daemon.token}\r\n\r\n"
        with contextlib.closing(socket.create_connection(("127.0.0.1", daemon.port), timeout=30)) as sock:
            sock.sendall(head.encode())
            time.sleep(0.1)
        assert eventually(lambda: daemon.call("POST", f"{path}/reset").status == 200)  # it is busy ending the first
        assert daemon.good("GET", path)["state"] == "up"


# --- its own end


def test_sigterm_with_desktops_and_streams() -> None:
    """Desktops are closed, a call under way is told, an open stream ends, and nothing is left."""
    with scratch_state() as config:
        before = take(config.state_dir, descriptors=False)
        with running(config) as daemon:
            path = f"/v1/slots/{daemon.create(task=TASK)}"
            connection = daemon.connect()
            connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {daemon.token}"})
            stream = connection.getresponse()
            with ThreadPoolExecutor() as pool:
                under_way = pool.submit(daemon.call, "POST", f"{path}/wait", {"timeout": 60})
                slow = pool.submit(daemon.call, "POST", f"{path}/execute", {"command": "sleep 30"})
                time.sleep(0.5)
                began = time.monotonic()
                assert daemon.stop() == 0
                assert time.monotonic() - began < 10
                assert slow.result().json["code"] == "shutting_down"
                assert under_way.result().status == 503
            with contextlib.suppress(http.client.IncompleteRead, OSError):
                stream.read()
            connection.close()
            episode = read_episodes(config.state_dir)[0]
            assert episode["ended_at"] is not None
        before[f"file {config.state_dir / 'token'}"] = 1
        assert_unchanged(before, config.state_dir, descriptors=False)


def test_sigkill_then_a_new_start() -> None:
    """The next start leaves nothing of the killed one's desktops, marks their episodes invalid, and serves."""
    with scratch_state() as config:
        with running(config) as daemon:
            made = [daemon.good("POST", "/v1/slots", {"task": TASK}, status=201) for _ in range(2)]
            reward = daemon.good("POST", f"/v1/slots/{made[0]['id']}/verify", {})
            assert reward["valid"]
            token = daemon.token
            daemon.process.kill()
            daemon.process.wait()
        before_start = read_episode(config.state_dir, made[0]["episode"])
        assert before_start["ended_at"] is None and len(before_start["rewards"]) == 1
        with running(config) as daemon:
            assert daemon.token == token and daemon.slots() == []
            for slot in made:
                episode = daemon.good("GET", f"/v1/episodes/{slot['episode']}")
                assert (episode["verdict"], episode["bad_gates"]) == ("invalid", ["watched"])
                assert episode["ended_at"] and episode["gates"][-1]["reason"] == NOT_WATCHED
                assert not any(slot["id"] in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
            assert os.listdir(config.state_dir / "slots") == []
            with daemon.slot(task=TASK) as path:
                assert daemon.good("POST", f"{path}/verify", {})["valid"]
            assert daemon.stop() == 0


def test_the_address_is_taken(daemon: Running) -> None:
    """A second daemon on the same port says so, in words."""
    argv = [sys.executable, "-c", "from drums.cli import main; main()", "serve", "--port", str(daemon.port)]
    argv += ["--state-dir", str(daemon.config.state_dir)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "cannot listen" in done.stderr and "Traceback" not in done.stderr


def test_a_unix_socket() -> None:
    """It can be used by root alone, and is gone afterwards."""
    with scratch_state() as config:
        path = config.state_dir / "drums.sock"
        argv = [sys.executable, "-c", "from drums._drumsd import main; main()", "--unix", str(path), "--json"]
        argv += ["--state-dir", str(config.state_dir)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("{"))
            assert json.loads(line)["url"] == f"unix:{path}"
            assert path.stat().st_mode & 0o777 == 0o600
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
                sock.sendall(b"GET /v1/health HTTP/1.1\r\nHost: drums\r\nConnection: close\r\n\r\n")
                assert b'"status":"ok"' in sock.makefile("rb").read()
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            assert process.wait(30) == 0
        assert not path.exists()


def test_closing_a_desktop_that_is_being_made(daemon: Running, spare: str) -> None:
    """Its creator is told so, in the stream that named the slot, and nothing is left."""
    before = take(daemon.config.state_dir, descriptors=False, processes=False)
    for _ in range(3):
        with contextlib.closing(daemon.connect()) as connection:
            fields = {"Authorization": f"Bearer {daemon.token}", "Accept": "text/event-stream"}
            connection.request("POST", "/v1/slots", json.dumps({"task": TASK}), fields)
            response = connection.getresponse()
            while not (line := response.readline()).startswith(b"data: "):
                assert line
            slot = json.loads(line.removeprefix(b"data: "))["slot"]
            assert daemon.call("DELETE", f"/v1/slots/{slot}").status == 204
            kind, document = events_of(Reply(200, {"content-type": "text/event-stream"}, response.read()))[-1]
        assert kind == "problem" and document["code"] != "internal_error", document
        daemon.call("GET", f"/v1/slots/{slot}").refused(404, "slot_not_found")
    # A lease begins when the desktop is there: making it takes no time of it.
    short = daemon.good("POST", "/v1/slots", {"task": TASK, "ttl": 0.05}, status=201)["id"]
    patience = time.monotonic() + 20
    while short in [s["id"] for s in daemon.slots()]:
        assert time.monotonic() < patience
        time.sleep(0.1)
    assert [s["id"] for s in daemon.slots()] == [spare.rpartition("/")[2]]
    assert_unchanged(before, daemon.config.state_dir, descriptors=False, processes=False)
