"""What the gateway of a desktop's ports notes, of whatever may answer there; and that it follows frames. No desktop."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from drums.errors import PortError
from drums_core import port_gateway
from drums_core.port_gateway import PortGateway

Program = Callable[[trio.SocketStream], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
SWITCHES = b"HTTP/1.1 101 Switching Protocols\r\n\r\n"


def frame(opcode: int, content: bytes = b"") -> bytes:
    """A masked frame, as clients send them."""
    size = len(content)
    if size < 126:
        head = bytes([0x80 | opcode, 0x80 | size])
    elif size < 1 << 16:
        head = bytes([0x80 | opcode, 0xFE]) + struct.pack(">H", size)
    else:
        head = bytes([0x80 | opcode, 0xFF]) + struct.pack(">Q", size)
    return head + b"mask" + content


# --- what may listen in a desktop


def says(*parts: bytes, waits: bool = False) -> Program:
    """Reads once, says this, part by part, and ends; with `waits`, when the other end does."""

    async def program(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        for part in parts:
            await stream.send_all(part)
            await trio.sleep(0.02)
        while waits and await stream.receive_some():
            pass

    return program


async def mute(stream: trio.SocketStream) -> None:
    """Takes all, and says nothing."""
    while await stream.receive_some():
        pass


async def closes(stream: trio.SocketStream) -> None:
    """Ends at once."""


async def endless(stream: trio.SocketStream) -> None:
    """Says more and more."""
    await stream.send_all(OK)
    while True:
        await stream.send_all(b"x" * 65536)


async def until_goodbye(stream: trio.SocketStream) -> None:
    """A websocket that ends when it is told so."""
    await stream.receive_some()
    await stream.send_all(SWITCHES)
    while b"\x88" not in await stream.receive_some():
        pass
    await stream.send_all(b"\x88\x00")


# --- what a checker does


async def asks(stream: trio.SocketStream) -> None:
    """A request, and all of the reply."""
    await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
    while await stream.receive_some():
        pass


async def gives_up(stream: trio.SocketStream) -> None:
    """A request, and no patience."""
    await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
    with trio.move_on_after(0.1):
        await stream.receive_some()


async def leaves(stream: trio.SocketStream) -> None:
    """No word."""


async def talks(stream: trio.SocketStream) -> None:
    """A websocket, closed in order."""
    await stream.send_all(b"GET /ws HTTP/1.1\r\n\r\n")
    await stream.receive_some()
    await stream.send_all(frame(1, b"hello" * 50))
    await stream.send_all(frame(8))
    while await stream.receive_some():
        pass


async def talks_and_leaves(stream: trio.SocketStream) -> None:
    """A websocket whose client just goes."""
    await stream.send_all(b"GET /ws HTTP/1.1\r\n\r\n")
    await stream.receive_some()
    await stream.send_all(frame(1, b"hello"))


async def listens(stream: trio.SocketStream) -> None:
    """A websocket that it does not end."""
    await stream.send_all(b"GET /ws HTTP/1.1\r\n\r\n")
    while await stream.receive_some():
        pass


@attrs.define
class Told:
    """What was noted."""

    failures: list[str]
    hostile: list[str]
    failed: set[int]


async def told(*meetings: tuple[Program | None, Program], until: trio.Event | None = None) -> Told:
    """What the gateway notes of connections one after the other, where None is a port that takes none.

    Args:
        until: the check ends with this, and the last connection has not ended by then.
    """
    programs = iter([program for program, _ in meetings])

    @asynccontextmanager
    async def connect(port: int) -> AsyncIterator[trio.SocketStream]:
        program = next(programs)
        if program is None:
            raise PortError(f"port {port} takes no connection", hint="start it", port=port)
        ours, theirs = trio.socket.socketpair()
        async with trio.open_nursery() as nursery, trio.SocketStream(ours) as stream:
            nursery.start_soon(_run, program, trio.SocketStream(theirs))
            yield stream
            nursery.cancel_scope.cancel()

    found = Told([], [], set())
    gateway = PortGateway(connect, found.failures, found.hostile, found.failed)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.serve, 9222, listener.detach())
            for number, (_, client) in enumerate(meetings):
                async with await trio.open_tcp_stream(*address) as stream:
                    with suppress(trio.BrokenResourceError), trio.fail_after(20):
                        if until is not None and number == len(meetings) - 1:
                            nursery.start_soon(client, stream)
                            await until.wait()
                            nursery.cancel_scope.cancel()
                        else:
                            await client(stream)
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
    return found


async def _run(program: Program, stream: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError):
        async with stream:
            await program(stream)


CASES: dict[str, tuple[list[tuple[Program | None, Program]], str]] = {
    "an answer": ([(says(OK), asks)], ""),
    "an answer in pieces": ([(says(OK[:5], OK[5:11], OK[11:]), asks)], ""),
    "an answer of any status": ([(says(b"HTTP/1.0 404 No\r\n\r\n"), asks)], ""),
    "no word from either": ([(mute, leaves)], ""),
    "nothing listens": ([(None, asks)], "port 9222 takes no connection"),
    "closes at once": ([(closes, asks)], "closed the connection without a reply"),
    "closes without a reply": ([(says(), asks)], "closed the connection without a reply"),
    "is mute": ([(mute, gives_up)], "gave no reply"),
    "speaks no HTTP": ([(says(b"SSH-2.0-OpenSSH"), asks)], "answers b'SSH-2.0-Open', which is no HTTP"),
    "half a word": ([(says(b"HTTP"), asks)], "answers b'HTTP', which is no HTTP"),
    "comes up later": ([(None, asks), (closes, asks), (says(OK), asks)], ""),
    "goes down later": ([(says(OK), asks), (None, asks)], "takes no connection"),
    "a look afterwards": ([(None, asks), (mute, leaves)], "takes no connection"),
    "websocket, closed in order": ([(until_goodbye, talks)], ""),
    "websocket, left": ([(says(SWITCHES, waits=True), talks_and_leaves)], ""),
    "websocket, broken off": ([(says(SWITCHES, b"\x81\x01x"), listens)], "broke the websocket off"),
    "websocket, broken off, and again": (
        [(says(SWITCHES), listens), (until_goodbye, talks)],
        "broke the websocket off",
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_what_is_noted(name: str) -> None:
    meetings, fault = CASES[name]
    found = await told(*meetings)
    assert len(found.failures) == (1 if fault else 0), found.failures
    assert fault in "".join(found.failures)
    assert found.failed == ({9222} if fault else set())
    assert found.hostile == (found.failures if name == "speaks no HTTP" else [])


async def test_a_check_that_ends_before_an_answer() -> None:
    asked, answered = trio.Event(), trio.Event()

    async def is_asked(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        asked.set()
        await mute(stream)

    async def is_answered(stream: trio.SocketStream) -> None:
        await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
        await stream.receive_some()
        answered.set()
        await trio.sleep_forever()

    assert (await told((is_asked, asks), until=asked)).failures == ["port 9222 of the desktop gave no reply"]
    assert (await told((says(OK, waits=True), is_answered), until=answered)).failures == []


def test_only_a_later_connection_stands_in_for_one_without_an_answer() -> None:
    """Of those that go on at the same time, whichever ends first."""
    port = port_gateway._Port(9222)
    older, newer = port.talk(), port.talk()
    for talk in (older, newer):
        talk.asks(b"GET / HTTP/1.1\r\n\r\n")
    port.gave_no_answer(older)
    assert port.unanswered is older
    port.gave_no_answer(newer)
    assert port.unanswered is newer
    assert older.says(OK)
    port.answered(older)
    assert port.unanswered is newer
    assert newer.says(OK)
    port.answered(newer)
    assert port.unanswered is None
    port.gave_no_answer(older)  # as it ends
    assert port.unanswered is None
    port.gave_no_answer(port.talk())
    assert port.unanswered is not None


async def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the desktop sends, what the checker sends, and how often; each counts although an answer follows."""
    monkeypatch.setattr(port_gateway, "RECEIVED_LIMIT_BYTES", 1 << 20)
    found = await told((endless, asks), (says(OK), asks))
    assert [x for x in found.failures if "sent more than 1 MiB" in x] == found.hostile != []
    monkeypatch.setattr(port_gateway, "SENT_LIMIT_BYTES", 10)
    found = await told((mute, asks))
    assert "the checker sent more than" in found.failures[0] and not found.hostile
    monkeypatch.undo()
    monkeypatch.setattr(port_gateway, "CONNECTIONS", 1)
    found = await told((says(OK), asks), (says(OK), asks))
    assert "more than 1 connections" in found.failures[0]


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 9, 10]), st.sampled_from([0, 1, 125, 126, 300, 70_000]))),
    st.lists(st.integers(1, 40_000), min_size=1),
    st.booleans(),
)
def test_frames_are_followed_however_they_are_cut(sent: list[tuple[int, int]], cuts: list[int], goodbye: bool) -> None:
    frames = port_gateway._Frames()
    data = b"".join(frame(opcode, b"\x88" * size) for opcode, size in sent) + (
        frame(8, b"\x03\xe8") if goodbye else b""
    )
    at = 0
    while at < len(data):
        size = cuts[at % len(cuts)]
        frames.feed(data[at : at + size])
        at += size
    assert frames.closing is goodbye
