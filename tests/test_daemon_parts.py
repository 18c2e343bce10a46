"""Parts of the daemon without desktops: the token, where it listens, idempotency keys, and single connections."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from click.testing import CliRunner
from starlette.types import Receive, Scope, Send

from drums.errors import ConfigError, PrerequisiteError
from drums_core.commands.serve import serve as command
from drums_core.config import load_config
from drums_core.daemon import guard, idempotency, routes, server
from drums_core.daemon.answers import Answer, Plain
from drums_core.daemon.guard import Guard
from drums_core.daemon.idempotency import Ledger
from drums_core.daemon.server import Server, close_socket, open_socket, url_of
from drums_core.daemon.token import FILE, PREFIX, ensure_token

# --- the token


def test_the_token_is_made_once(tmp_path: Path) -> None:
    """32 random bytes behind the prefix, mode 0600, the same at the next start; nothing else is left."""
    token = ensure_token(tmp_path)
    assert token.startswith(PREFIX) and len(token) == len(PREFIX) + 43
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert ensure_token(tmp_path) == token and os.listdir(tmp_path) == [FILE]


def test_two_first_starts_at_once(tmp_path: Path) -> None:
    """Both get the same token."""
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_token(tmp_path))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(found)) == 1


@pytest.mark.parametrize(("content", "mode"), [("drums_sk_" + "x" * 43, 0o644), ("", 0o600), ("hello", 0o600)])
def test_a_token_file_that_will_not_do(tmp_path: Path, content: str, mode: int) -> None:
    """One that others can read, or that holds no token, is refused with what to do."""
    (tmp_path / FILE).write_text(content)
    (tmp_path / FILE).chmod(mode)
    with pytest.raises(PrerequisiteError) as caught:
        ensure_token(tmp_path)
    assert str(tmp_path / FILE) in caught.value.message and caught.value.hint


# --- where it listens


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "127.9.9.9:0", "[::1]:0"])
def test_loopback(listen: str) -> None:
    """Loopback addresses are allowed; port 0 is any free one."""
    try:
        sock = open_socket(listen, allow_remote=False)
    except PrerequisiteError as e:
        if "[" in listen:
            pytest.skip(f"no IPv6 here: {e}")
        raise
    with contextlib.closing(sock):
        assert url_of(sock).startswith("http://") and not url_of(sock).endswith(":0")


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_other_machines(listen: str) -> None:
    """An address that other machines reach needs `allow_remote`; the error says what is the matter and what to do."""
    with pytest.raises(ConfigError, match="other machines") as caught:
        open_socket(listen, allow_remote=False)
    assert "allow_remote" in caught.value.hint and caught.value.path == "$.listen"


def test_allowed_remote() -> None:
    """With it, it is bound."""
    with contextlib.closing(open_socket("0.0.0.0:0", allow_remote=True)) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize(
    "listen", ["", "7070", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "host.example:1", "unix:x"]
)
def test_a_malformed_address(listen: str) -> None:
    """It is named."""
    with pytest.raises(ConfigError, match=repr(listen)[1:-1] if listen else "listen is ''"):
        open_socket(listen, allow_remote=True)


def test_the_command_refuses_other_machines(tmp_path: Path) -> None:
    """`drums serve --host 0.0.0.0` ends before anything is opened."""
    result = CliRunner().invoke(command, ["--host", "0.0.0.0", "--state-dir", str(tmp_path / "state")])
    assert isinstance(result.exception, ConfigError) and not (tmp_path / "state").exists()
    both = CliRunner().invoke(command, ["--port", "1", "--unix", "/x", "--state-dir", str(tmp_path / "state")])
    assert isinstance(both.exception, ConfigError) and "--unix" in both.exception.message


def test_unix_sockets(tmp_path: Path) -> None:
    """Mode 0600; one that a killed daemon left is replaced, one that is in use is not, nor is another file."""
    path = tmp_path / "s"
    first = open_socket(f"unix:{path}", allow_remote=False)
    first.listen()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and url_of(first) == f"unix:{path}"
    with pytest.raises(PrerequisiteError, match="listens there"):
        open_socket(f"unix:{path}", allow_remote=False)
    first.close()
    second = open_socket(f"unix:{path}", allow_remote=False)
    close_socket(second, f"unix:{path}")
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(PrerequisiteError):
        open_socket(f"unix:{path}", allow_remote=False)
    assert path.read_text() == "precious"


def test_configuration() -> None:
    """`listen` comes from the environment too; `allow_remote` does not, by design."""
    config = load_config(environ={"DRUMS_LISTEN": "unix:/x", "DRUMS_ALLOW_REMOTE": "1"})
    assert config.listen == "unix:/x" and config.allow_remote is False


# --- idempotency keys


def counting(answers: list[int], **more: Any) -> Callable[[], Awaitable[Answer]]:
    """Work that counts how often it was done."""

    async def run() -> Answer:
        await trio.lowlevel.checkpoint()
        answers.append(len(answers))
        return Answer(200, {"n": answers[-1]}, **more)

    return run


async def test_a_kept_answer() -> None:
    """It is given again, for that request alone."""
    ledger, done = Ledger(), list[int]()
    assert (await ledger.answer("k", b"a", counting(done))).body == {"n": 0}
    assert (await ledger.answer("k", b"a", counting(done))).body == {"n": 0}
    assert (await ledger.answer("k", b"b", counting(done))).status == 409
    assert (await ledger.answer("l", b"a", counting(done))).body == {"n": 1}


async def test_a_repeatable_answer_is_not_kept() -> None:
    """What has done nothing is tried anew."""
    ledger, done = Ledger(), list[int]()
    assert (await ledger.answer("k", b"a", counting(done, repeatable=True))).body == {"n": 0}
    assert (await ledger.answer("k", b"b", counting(done))).body == {"n": 1}


async def test_the_first_is_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    """Another one that waits with the same key does it then."""
    ledger, done = Ledger(), list[int]()
    scope = trio.CancelScope()

    async def first() -> None:
        async def slow() -> Answer:
            await trio.sleep(10)
            raise AssertionError("it is cancelled")

        with scope:
            await ledger.answer("k", b"a", slow)

    async def second() -> None:
        assert (await ledger.answer("k", b"a", counting(done))).body == {"n": 0}

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await trio.sleep(1)
        nursery.start_soon(second)
        await trio.sleep(1)
        scope.cancel()


async def test_a_lost_answer_is_taken_back_unless_somebody_was_told() -> None:
    """Then the key is free again; an answer that was given twice stands."""
    for told in (False, True):
        ledger, done, undone = Ledger(), list[int](), list[str]()

        async def undo(undone: list[str] = undone) -> None:
            undone.append("undone")

        answer = await ledger.answer("k", b"a", counting(done, undo=undo))
        if told:
            await ledger.answer("k", b"a", counting(done))
        ledger.forget("k")
        await answer.take_back()
        assert undone == ([] if told else ["undone"])
        again = await ledger.answer("k", b"a", counting(done))
        assert again.body == {"n": 0 if told else 1}


async def test_old_keys_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """When there are too many, or their answers are too large, the oldest go first."""
    monkeypatch.setattr(idempotency, "KEPT_KEYS", 3)
    ledger, done = Ledger(), list[int]()
    for key in "abcd":
        await ledger.answer(key, b"", counting(done))
    assert (await ledger.answer("d", b"", counting(done))).body == {"n": 3}
    assert (await ledger.answer("a", b"", counting(done))).body == {"n": 4}
    monkeypatch.setattr(idempotency, "KEPT_BYTES", 10)
    assert (await ledger.answer("x", b"", counting(done))).body == {"n": 5}
    assert (await ledger.answer("a", b"", counting(done))).body == {"n": 6}


# --- single connections


@contextlib.asynccontextmanager
async def served(app: Any, *, max_connections: int = 10) -> AsyncIterator[tuple[int, Server]]:
    """An application on a free port, behind the guard, with the token `t`."""
    sock = open_socket("127.0.0.1:0", allow_remote=False)
    port = sock.getsockname()[1]
    stopping = trio.Event()
    serving = Server(Guard(app, "t", stopping), [sock], max_connections)
    async with trio.open_nursery() as nursery:
        await nursery.start(serving.run)
        yield port, serving
        stopping.set()
        serving.stop.set()


async def drained(serving: Server) -> None:
    """Wait until no connection is open."""
    while serving._open:  # noqa: ASYNC110 - it tells nobody
        await trio.sleep(0.02)


async def exchange(port: int, data: bytes, *, limit_s: float = 10.0) -> bytes:
    """Send, and read to the end."""
    got = b""
    with trio.fail_after(limit_s):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(data)
            async for part in stream:
                got += part
    return got


HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await Plain(Answer(200, {"size": size}))(scope, receive, send)


async def test_a_body_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not go on does not hold the call; what comes of the error is the application's business."""
    monkeypatch.setattr(guard, "BODY_STALL_S", 0.2)
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await echo(scope, receive, send)
        except Exception as e:
            seen.append(type(e).__name__)
            raise

    async with served(app) as (port, _):
        await exchange(port, HEAD + b"Content-Length: 10\r\n\r\nabc")
        assert seen == ["RequestTimeout"]
        assert b'{"size":10}' in await exchange(
            port, HEAD + b"Connection: close\r\nContent-Length: 10\r\n\r\n0123456789"
        )


async def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses its connection after a while, and the application ends."""
    monkeypatch.setattr(server, "SEND_LIMIT_S", 0.3)
    ended = trio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        finally:
            ended.set()

    async with served(endless) as (port, serving):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(HEAD + b"\r\n")
        with trio.fail_after(10):
            await ended.wait()
            await drained(serving)
        await stream.aclose()


async def test_a_client_that_leaves_cancels_the_call() -> None:
    """Also when it has sent its next request already, which is dropped."""
    for more in (b"", b"GET /y HTTP/1.1\r\nHost: x\r\n\r\n" * 3):
        started, ended = trio.Event(), trio.Event()

        async def app(
            scope: Scope, receive: Receive, send: Send, started: trio.Event = started, ended: trio.Event = ended
        ) -> None:
            started.set()
            try:
                await trio.sleep_forever()
            finally:
                ended.set()

        async with served(app) as (port, serving):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(HEAD + b"Content-Length: 0\r\n\r\n" + more)
            with trio.fail_after(5):
                await started.wait()
                await stream.aclose()
                await ended.wait()
                await drained(serving)


async def test_pipelining_is_refused() -> None:
    """The first request is answered, and its answer says that the connection ends; so does the connection."""
    request = b"GET /x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\n\r\n"
    async with served(echo) as (port, _):
        got = await exchange(port, request * 3)
    assert got.count(b"HTTP/1.1 200") == 1 and b"connection: close" in got.lower()


async def test_no_upgrades() -> None:
    """A websocket and HTTP/2 are not spoken: the request is answered as it stands, or refused."""
    ask = b"GET /x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\nConnection: Upgrade, close\r\nUpgrade: %s\r\n\r\n"
    async with served(echo) as (port, _):
        for kind in (b"websocket", b"h2c"):
            assert (await exchange(port, ask % kind)).startswith(b"HTTP/1.1 200")
        assert (await exchange(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")).startswith(b"HTTP/1.1 4")


async def test_a_defect_ends_one_connection_alone() -> None:
    """An application that raises, before or while it answers, costs its own call."""

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] != "/x":
            raise RuntimeError("a defect")
        await echo(scope, receive, send)

    async with served(broken) as (port, _):
        for path in (b"/early", b"/late"):
            await exchange(port, HEAD.replace(b"/x", path) + b"Content-Length: 0\r\n\r\n")
        got = await exchange(port, HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nab")
        assert b'{"size":2}' in got


async def test_stopping_answers_what_is_under_way() -> None:
    """A call that had not begun to answer is told that the daemon stops."""
    got: list[bytes] = []

    async def forever(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep_forever()

    async def ask(port: int) -> None:
        got.append(await exchange(port, HEAD + b"Content-Length: 0\r\n\r\n"))

    async with trio.open_nursery() as nursery, served(forever) as (port, _):
        nursery.start_soon(ask, port)
        await trio.sleep(0.2)
    assert got[0].startswith(b"HTTP/1.1 503") and b"shutting_down" in got[0]


def test_sockets_are_not_left_listening() -> None:
    """A bound socket refuses until it serves: nobody waits for a daemon that does not come up."""
    with contextlib.closing(open_socket("127.0.0.1:0", allow_remote=False)) as sock, pytest.raises(OSError):
        socket.create_connection(sock.getsockname(), timeout=1)


async def test_an_image_whose_setting_cannot_be_read_does_not_hide_the_others() -> None:
    """The key of a source that the setting `software` names, say."""

    class Images:
        def names(self) -> list[str]:
            return ["minimal", "osworld"]

        def load(self, name: str) -> Any:
            facts = {"digest": "0", "built_at": 0.0, "drums": "0", "size_bytes": 1}
            return SimpleNamespace(name=name, golden_id=lambda: None, **facts)

        def is_current(self, image: Any) -> bool:
            if image.name == "osworld":
                raise ConfigError("the key cannot be read", path="$.software")
            return True

    call: Any = SimpleNamespace(host=SimpleNamespace(images=Images()))
    found = await routes._images(call)
    assert [(x["name"], x["current"]) for x in found["images"]] == [("minimal", True), ("osworld", False)]
