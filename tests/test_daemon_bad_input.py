"""Bad input to the daemon over a real port: whatever a caller sends, the answer is no failure of the daemon's.

First schemathesis makes it up from the OpenAPI document. Its runs are small, since some calls make desktops: enough to
try each route with what the schema allows and forbids.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from requires import requires
from scratch import scratch_state
from served import MAX_SLOTS, Running, eventually, running
from test_openapi import DOCUMENT, schema_errors

from drums_core.daemon.routes import EVENTS, OPERATIONS

pytestmark = requires("root", "criu")
# Streams do not end; one method of a port stands for all.
TRIED = [o for o in OPERATIONS if o.answer != EVENTS and (not o.of_port or o.method == "POST")]
HEAVY = {"create_slot", "fork_slot", "reset_slot", "save_slot", "verify_slot", "execute_slot", "step_slot"}
ALLOWED_5XX = {(503, "capacity_exhausted"), (502, "guest_error"), (502, "port_error")}
"""The host is full; the desktop does not answer, or lacks what is asked for (the accessibility tree)."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """A daemon of these tests' own."""
    with scratch_state() as config, running(config) as found:
        yield found
        assert found.stop() == 0


@pytest.mark.parametrize(
    ("name", "mode"),
    [(o.name, "positive") for o in TRIED]
    + [(o.name, "negative") for o in TRIED if o.path_parameters or o.query or o.body],
)
@pytest.mark.filterwarnings("ignore")
def test_no_failure_of_the_daemon(daemon: Running, name: str, mode: str) -> None:
    """No 5xx but those that say what the host or the desktop lacks; every answer is what the document says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    (operation,) = [
        found.ok() for found in schema.get_all_operations() if found.ok().definition.raw["operationId"] == name
    ]
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    slot = daemon.create() if "{slot}" in operation.path and mode == "positive" else None

    @settings(
        max_examples=8 if name in HEAVY else 25,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def run(case: Any) -> None:
        if slot is not None:
            case.path_parameters = {**(case.path_parameters or {}), "slot": slot}
        if name == "wait_slot" and isinstance(case.body, dict):
            case.body["timeout"] = 0.01
        if name == "execute_slot" and isinstance(case.body, dict) and mode == "positive":
            case.body["timeout"] = 2.0
        headers = {"Authorization": f"Bearer {daemon.token}"}
        answer = case.call(base_url=f"http://127.0.0.1:{daemon.port}", headers=headers, timeout=60)
        if answer.status_code >= 400:
            problem = answer.json()
            assert schema_errors("Problem", problem) == []
            assert answer.status_code < 500 or (answer.status_code, problem["code"]) in ALLOWED_5XX, problem
        elif name == "create_slot":
            daemon.call("DELETE", f"/v1/slots/{answer.json()['id']}")
        elif name == "fork_slot":
            for child in answer.json()["slots"]:
                daemon.call("DELETE", f"/v1/slots/{child['id']}")

    try:
        run()
        assert daemon.good("GET", "/v1/health")["status"] == "ok"
    finally:
        if slot is not None:
            daemon.call("DELETE", f"/v1/slots/{slot}")
        for checkpoint in daemon.good("GET", "/v1/checkpoints")["checkpoints"]:
            if checkpoint["kind"] in ("saved", "end_state"):
                daemon.call("DELETE", f"/v1/checkpoints/{checkpoint['id']}")


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
