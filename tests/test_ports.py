"""Ports of a desktop through the daemon: what goes in, what comes out, and whatever a program there may answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
from port_server import LOG
from requires import requires
from scratch import scratch_state
from served import TASK, Reply, Running, eventually, running
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

import drums
from drums.errors import ConfigError, PortError
from drums_core.config import HostConfig, load_config
from drums_core.daemon.ports import with_our_urls

SERVER = Path(__file__).with_name("port_server.py")
BASE = "ws://drums.example/v1/slots/d-1/ports/9222"


@attrs.define
class Desk:
    """A desktop in which something listens on port 9222, and nothing on 8080."""

    daemon: Running
    path: str

    def ask(self, method: str, target: str, body: Any = None, *, port: int = 9222, **more: Any) -> Reply:
        """One request through the daemon."""
        return self.daemon.call(method, f"{self.path}/ports/{port}{target}", body, **more)

    def log(self) -> list[dict[str, Any]]:
        """What the program was sent."""
        content = self.daemon.call("GET", f"{self.path}/files?path={LOG}").content
        return [json.loads(line) for line in content.splitlines()]


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    """One for the tests of this module. No test of them trips the daemon; it ends well with a websocket open."""
    with scratch_state() as config, running(config) as daemon:
        path = f"/v1/slots/{daemon.create(task=TASK, ttl=600)}"
        serve(daemon, path)
        yield Desk(daemon, path)
        with WebSocketClient(Desk(daemon, path), "/ws/last") as client:
            assert isinstance(next(client.events()), AcceptConnection)
            assert daemon.stop() == 0
        log = config.state_dir.parent / f"{config.state_dir.name}.log"
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]


def serve(daemon: Running, path: str) -> None:
    """Let the program listen in the desktop."""
    daemon.good("PUT", f"{path}/files?path=/tmp/port_server.py", SERVER.read_bytes(), status=204)
    start = "setsid python3 /tmp/port_server.py 9222 >/dev/null 2>&1 </dev/null &"
    daemon.good("POST", f"{path}/execute", {"command": start, "shell": True})
    assert eventually(lambda: Desk(daemon, path).ask("GET", "/").status == 200, 60)


@requires("root", "criu")
def test_a_request_goes_through(desk: Desk) -> None:
    """Method, path, query, body and status as they are; the token and all that is not needed stays out."""
    fields = {
        "Cookie": "session=1",
        "Origin": "http://x",
        "X-Forwarded-For": "10.0.0.1",
        "Connection": "close, X-Hop",
        "X-Hop": "1",
        "Proxy-Authorization": "Bearer x",
        "Idempotency-Key": "k",
        "Content-Type": "text/x-odd",
        "X-Drums-Port-Authorization": "Basic OnNlY3JldA==",
    }
    reply = desk.ask("POST", "/a%2Fb/../c?x=%20&x=2&path", b"\x00\xffhello", headers=fields)
    assert (reply.status, reply.headers["x-drums-port"], reply.headers["content-type"]) == (
        201,
        "9222",
        "application/json",
    )
    told = reply.json
    assert (told["method"], told["target"]) == ("POST", "/a%2Fb/../c?x=%20&x=2&path")
    assert told["body"] == "\x00\xffhello"
    assert told["headers"] == {
        "host": "localhost:9222",
        "connection": "close",
        "content-type": "text/x-odd",
        "authorization": "Basic OnNlY3JldA==",
        "content-length": "7",
    }
    assert [desk.ask(m, "/").json["method"] for m in ("GET", "PUT", "DELETE")] == ["GET", "PUT", "DELETE"]
    assert desk.daemon.token not in json.dumps(desk.log())


@requires("root", "criu")
def test_debugger_urls_lead_through_the_daemon(desk: Desk) -> None:
    """By the host that the client asked; one that leads elsewhere is left out."""
    first, second = desk.ask("GET", "/json/list").json
    assert first == {
        "webSocketDebuggerUrl": f"ws://127.0.0.1:{desk.daemon.port}{desk.path}/ports/9222/devtools/page/A1"
    }
    assert second == {"id": "B"}
    behind_tls = {"Host": "drums.example", "X-Forwarded-Proto": "https"}
    url = desk.ask("GET", "/json", headers=behind_tls).json[0]["webSocketDebuggerUrl"]
    assert url == f"wss://drums.example{desk.path}/ports/9222/devtools/page/A1"


@requires("root", "criu")
def test_what_a_program_may_answer(desk: Desk) -> None:
    """An endless body, a huge header, nonsense and a redirect: each is told, none is followed, the daemon lives."""
    assert "16777216 bytes" in desk.ask("GET", "/endless").refused(502, "port_error")["detail"]
    assert "32768 bytes of header" in desk.ask("GET", "/headers").refused(502, "port_error")["detail"]
    assert "did not reply in HTTP" in desk.ask("GET", "/nonsense").refused(502, "port_error")["detail"]
    redirect = desk.ask("GET", "/redirect")
    assert redirect.status == 307 and redirect.headers["content-security-policy"] == "sandbox"
    assert not {"location", "set-cookie", "clear-site-data"} & set(redirect.headers)
    assert desk.ask("GET", "/").status == 200


@requires("root", "criu")
def test_what_is_refused(desk: Desk) -> None:
    """Nothing listens; a port that is not allowed; one that is none; the wrong token, which reaches no desktop."""
    told = desk.ask("GET", "/", port=8080).refused(502, "port_error")
    assert "refused" in told["detail"] and told["hint"]
    told = desk.ask("GET", "/health", port=5000).refused(403, "port_not_allowed")
    assert told["facts"]["allowed"] == [9222, 8080] and told["hint"]
    assert desk.ask("GET", "/", port=65536).refused(422, "config_error")["errors"][0]["path"] == "$path.port"
    before = len(desk.log())
    desk.ask("GET", "/wrong", token="drums_sk_wrong").refused(401, "unauthorized")
    desk.ask("GET", "/wrong", token=None).refused(401, "unauthorized")
    desk.ask("PUT", "/large", b"x" * (1 << 20 | 1)).refused(413, "payload_too_large")
    assert len(desk.log()) == before
    desk.daemon.call("GET", "/v1/slots/d-none/ports/9222/").refused(404, "slot_not_found")


class WebSocketClient:
    """A websocket's client side, as plain as can be."""

    def __init__(self, desk: Desk, target: str, *, port: int = 9222, token: str | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", desk.daemon.port), timeout=60)
        self.connection = WSConnection(ConnectionType.CLIENT)
        fields = [(b"authorization", f"Bearer {token or desk.daemon.token}".encode()), (b"cookie", b"a=b")]
        fields += [(b"origin", b"http://x"), (b"user-agent", b"a test")]
        target = f"{desk.path}/ports/{port}{target}"
        self.send(Request(host="drums.example", target=target, extra_headers=fields))

    def __enter__(self) -> WebSocketClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, event: Event) -> None:
        self.socket.sendall(self.connection.send(event))

    def events(self) -> Iterator[Event]:
        """What comes, to its end."""
        while data := self.socket.recv(1 << 16):
            self.connection.receive_data(data)
            yield from self.connection.events()

    def message(self) -> str | bytes:
        """The next one, put together."""
        parts: list[Any] = []
        for event in self.events():
            assert isinstance(event, Message), event
            parts.append(event.data)
            if event.message_finished:
                return "".join(parts) if isinstance(parts[0], str) else b"".join(parts)
        raise AssertionError("the connection ended")

    def refused(self) -> tuple[int, str]:
        """Status and code of the problem in place of a websocket."""
        with self:
            events = list(self.events())
        assert isinstance(events[0], RejectConnection), events
        body = b"".join(e.data for e in events if isinstance(e, RejectData))
        return events[0].status_code, json.loads(body)["code"]

    def closed(self) -> int:
        """The code with which it was closed; messages before it are dropped."""
        with self:
            return next(event.code for event in self.events() if isinstance(event, CloseConnection))


@requires("root", "criu")
def test_a_websocket_goes_through(desk: Desk) -> None:
    """Text and bytes, small and large, both ways, in whatever frames; the token and the origin stay out."""
    with WebSocketClient(desk, "/devtools/page/A1?x=1") as client:
        assert isinstance(next(client.events()), AcceptConnection)
        large = "\u20ac" * 1_000_000
        for data in ("hello", large):
            client.send(TextMessage(data))
            assert client.message() == data
        client.send(BytesMessage(b"\0" * 200_000))
        assert client.message() == b"\0" * 200_000
        assert desk.daemon.good("POST", f"{desk.path}/step", {"action": "WAIT"})["status"] == "success"
        client.send(CloseConnection(code=1000))
        assert client.closed() == 1000
    (told,) = [line for line in desk.log() if line["target"] == "/devtools/page/A1?x=1"]
    sent = {k: v for k, v in told["headers"].items() if k != "sec-websocket-key"}
    assert sent.pop("user-agent") == "a test"
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    assert sent == {"host": "localhost:9222", **upgrade}, sent
    assert desk.daemon.token not in json.dumps(desk.log())


@requires("root", "criu")
def test_websockets_that_are_refused(desk: Desk) -> None:
    """With a problem in place of the handshake, and nothing reaches the desktop for the wrong token."""
    assert WebSocketClient(desk, "/ws/wrong", token="drums_sk_wrong").refused() == (401, "unauthorized")
    assert WebSocketClient(desk, "/ws/wrong", port=5000).refused() == (403, "port_not_allowed")
    assert WebSocketClient(desk, "/ws/wrong", port=8080).refused() == (502, "port_error")
    assert WebSocketClient(desk, "/ws/none").refused() == (502, "port_error")
    assert "/ws/wrong" not in [line["target"] for line in desk.log()]


@requires("root", "criu")
def test_a_websocket_without_end(desk: Desk) -> None:
    """A message that has none is cut off, and the daemon lives."""
    assert WebSocketClient(desk, "/ws/endless").closed() == 1009
    assert desk.ask("GET", "/").status == 200


@requires("root", "criu")
@pytest.mark.parametrize("noise", [b"", b"\xff" * 4096, b"\x81\x05hello", b"\x81\xff" + b"\xff" * 8])
def test_a_client_that_breaks_off(desk: Desk, noise: bytes) -> None:
    """By leaving, or with frames that are none: the daemon and its other calls live on."""
    with WebSocketClient(desk, "/ws/left") as client:
        assert isinstance(next(client.events()), AcceptConnection)
        client.socket.sendall(noise)
    assert desk.ask("GET", "/").status == 200


@requires("root", "criu")
def test_the_client_knows_the_address(desk: Desk) -> None:
    """A URL and the fields to send, with which any HTTP client gets there."""
    with drums.connect(f"http://127.0.0.1:{desk.daemon.port}", desk.daemon.token) as client:
        address = client.slot(desk.path.rpartition("/")[2]).port()
        assert address.url == f"http://127.0.0.1:{desk.daemon.port}{desk.path}/ports/9222"
        assert desk.daemon.token not in repr(address)
        path = address.url.partition(str(desk.daemon.port))[2]
        assert desk.daemon.call("GET", f"{path}/", token=None, headers=dict(address.headers)).status == 200


@requires("root", "criu")
def test_a_verify_and_a_quarantine_end_what_is_open(desk: Desk) -> None:
    """A request under way is cut off by a verify, which sees no trace of it, and none begins until it is done."""
    with ThreadPoolExecutor() as pool:
        hanging = pool.submit(desk.ask, "GET", "/hang")
        assert eventually(lambda: desk.log()[-1]["target"] == "/hang", 60)
        assert desk.daemon.good("POST", f"{desk.path}/step", {"action": "WAIT"})["status"] == "success"
        websocket = WebSocketClient(desk, "/ws")
        assert isinstance(next(websocket.events()), AcceptConnection)
        websocket.send(TextMessage("x"))
        assert websocket.message() == "x"
        verifying = pool.submit(desk.daemon.good, "POST", f"{desk.path}/verify", {})
        assert websocket.closed() == 1012
        assert "'verify'" in hanging.result(60).refused(409, "slot_busy")["detail"]
        codes = set()
        while not verifying.done():
            reply = desk.ask("GET", "/")
            codes.add(reply.status if reply.status == 200 else reply.json["code"])
        reward = verifying.result()
        assert reward["valid"] is True and reward["score"] is not None and "slot_busy" in codes, (reward, codes)
        assert desk.ask("GET", "/").status == 200
        hanging = pool.submit(desk.ask, "GET", "/hang")
        assert eventually(lambda: desk.log()[-1]["target"] == "/hang", 60)
        desk.daemon.good("POST", f"{desk.path}/quarantine", {"reason": "a test"})
        assert "quarantined" in hanging.result(60).refused(409, "slot_busy")["detail"]
    desk.ask("GET", "/").refused(409, "slot_quarantined")
    desk.daemon.good("POST", f"{desk.path}/release")
    desk.ask("GET", "/").refused(409, "invalid_transition")
    desk.daemon.good("POST", f"{desk.path}/reset")
    serve(desk.daemon, desk.path)


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (
            {"webSocketDebuggerUrl": "ws://[::1]:9222/devtools/browser/b"},
            {"webSocketDebuggerUrl": f"{BASE}/devtools/browser/b"},
        ),
        ({"webSocketDebuggerUrl": "ws://x/devtools/a?b"}, {}),
        ({"webSocketDebuggerUrl": ["ws://x/devtools/a"]}, {}),
        ([5, None, {"id": "1"}], [5, None, {"id": "1"}]),
    ],
)
def test_listings(listing: Any, expected: Any) -> None:
    """Each URL is ours or gone."""
    assert json.loads(with_our_urls(json.dumps(listing).encode(), BASE)) == expected


def test_listings_that_hide_a_url() -> None:
    """An escaped or doubled name, a byte-order mark and bytes that are no UTF-8 hide nothing; text stays text."""
    for listing in (
        rb'{"webSocketDebugger\u0055rl": "ws://evil/x"}',
        b'{"webSocketDebuggerUrl": "ws://evil/x", "webSocketDebuggerUrl": "ws://evil/y"}',
        b'\xef\xbb\xbf{"webSocketDebuggerUrl": "ws://evil/x", "\xff": NaN}',
    ):
        assert b"evil" not in with_our_urls(listing, BASE)
    assert with_our_urls(b"Target is closing", BASE) == b"Target is closing"
    for listing in (b"[" * 200_000, b'{"webSocketDebuggerUrl": "ws://evil/x", "n": ' + b"1" * 5000 + b"}"):
        with pytest.raises(PortError):
            with_our_urls(listing, BASE)


@pytest.mark.parametrize("ports", [[5000], [0], [65536], [9222, 5000], ["x"]])
def test_ports_that_cannot_be_configured(ports: list[Any]) -> None:
    """The guest server's own, and what is no port."""
    with pytest.raises(ConfigError):
        load_config(environ={}, ports=ports)
    assert load_config(environ={}, ports=[]) == HostConfig(ports=())
