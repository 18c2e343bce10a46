"""The daemon over a real port, with real desktops: every route, clients that leave, and its own end."""

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
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from requires import requires
from scratch import scratch_state
from served import MAX_SLOTS, TASK, Reply, Running, events_of, eventually, running
from snapshot import assert_unchanged, take
from test_openapi import DOCUMENT

from drums_core.journal import NOT_WATCHED, read_episode, read_episodes

pytestmark = requires("root", "criu")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """A daemon for the tests of this module; at the end it stops in order, and nothing is left."""
    with scratch_state() as config, running(config) as found:
        yield found
        assert found.stop() == 0
        assert os.listdir(config.state_dir / "slots") == [] and os.listdir(config.state_dir / "run") == []


@pytest.fixture(scope="module")
def spare(daemon: Running) -> Iterator[str]:
    """A desktop that is there meanwhile."""
    with daemon.slot() as path:
        yield path


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
