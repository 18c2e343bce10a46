"""What comes back when something is wrong: a problem's code is an exception, and a broken connection is told as one."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio
from client_fake import TASK, TOKEN, Answer, Asked, FakeDaemon, a_slot, a_task, as_json, events, fake_daemon, problem

import drums
import drums._endpoint
from drums import _flows, _transport, errors
from drums.errors import AuthError, ConfigError, DaemonUnreachable, DrumsError, SlotNotFound, TaskNotFound


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with fake_daemon() as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are short here."""
    monkeypatch.setattr(_flows, "PAUSES_S", (0.001, 0.001))


def client_of(fake: FakeDaemon, token: str = TOKEN) -> drums.Client:
    return drums.connect(fake.url, token)


CLASSES: list[type[DrumsError]] = [
    c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, DrumsError)
]


def test_every_error_is_public() -> None:
    """`drums.X` is `drums.errors.X`; codes are told apart."""
    for kind in CLASSES:
        assert getattr(drums, kind.__name__, None) is kind or kind.__name__ not in drums.__all__
    codes = [c.code for c in CLASSES]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_a_code_is_its_exception(fake: FakeDaemon, kind: type[DrumsError]) -> None:
    """By the code, whatever the status; message, hint and facts ride along, and it can be pickled."""
    facts = {"slot": "d-1", "message": "no keyword", "hint": 1, "self": 2, "code": "x"}
    fake.script("GET /v1/slots", problem(kind.code, kind.status, detail="it is so", hint="do this", facts=facts))
    with client_of(fake) as client, pytest.raises(kind) as caught:
        client.slots()
    error = caught.value
    assert type(error) is kind
    assert (error.message, error.hint, error.facts["slot"], error.slot) == ("it is so", "do this", "d-1", "d-1")
    assert str(error) == "it is so (do this)"


def test_an_error_can_be_pickled(fake: FakeDaemon) -> None:
    """Workers of a training loop hand errors on."""
    fake.script("GET /v1/slots", problem("setup_failed", 422, detail="step 2", facts={"index": 2}))
    with client_of(fake) as client, pytest.raises(drums.SetupFailed) as caught:
        client.slots()
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is drums.SetupFailed and again.index == 2


@pytest.mark.parametrize(
    ("code", "status"),
    [("connection_limit", 503), ("request_timeout", 408), ("idempotency_conflict", 409), ("of_a_later_version", 418)],
)
def test_a_code_without_a_class(fake: FakeDaemon, code: str, status: int) -> None:
    """A `DrumsError` that has the code and the status; the facts too."""
    fake.script("GET /v1/slots", problem(code, status, detail="so", facts={"candidates": ["a", "b"]}))
    with client_of(fake) as client, pytest.raises(DrumsError) as caught:
        client.slots()
    assert type(caught.value) is DrumsError
    assert (caught.value.code, caught.value.status, caught.value.candidates) == (code, status, ["a", "b"])
    assert caught.value.facts["code"] == code


def test_wrong_paths_are_told(fake: FakeDaemon) -> None:
    """A refused body names every wrong path."""
    wrong = [{"path": "$.ttl", "message": "expected float, got str"}]
    fake.script("POST /v1/slots", problem("config_error", 422, detail="$.ttl: expected float, got str", errors=wrong))
    with client_of(fake) as client, pytest.raises(ConfigError) as caught:
        client.create(ttl="soon")  # type: ignore[arg-type]
    assert caught.value.errors == wrong and "$.ttl" in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(502, b"<html>Bad Gateway</html>", {"Content-Type": "text/html"}),
        Answer(500, b"", {}),
        Answer(500, b"\xff\xfe", {}),
        Answer(404, b"[1, 2]"),
        Answer(404, b'{"code": 7, "detail": null, "facts": [], "hint": null, "errors": 1}'),
        Answer(200, b"<html>Welcome</html>", {"Content-Type": "text/html"}),
        Answer(200, b"[]"),
        Answer(200, b"{}"),
        Answer(200, b'{"slots": {}}'),
        Answer(200, b"{", {}),
    ],
)
def test_answers_of_something_else(fake: FakeDaemon, answer: Answer) -> None:
    """Whatever answers where a daemon should: an error of drums that says what it was, never a KeyError."""
    fake.script("GET /v1/slots", answer)
    with client_of(fake) as client, pytest.raises(DrumsError, match="GET /v1/slots"):
        client.slots()


@pytest.mark.parametrize("body", [b"{}", b"[]", b'"x"', b'{"id": "d-1"}', b'{"score": 1}'])
def test_slots_and_rewards_of_something_else(fake: FakeDaemon, body: bytes) -> None:
    """A slot without an id, a reward without a verdict."""
    with client_of(fake) as client:
        env = client.create(TASK)
        fake.script("POST .*", Answer(200, body))
        for ask in (client.create, env.reset, env.verify, env.fork, env.wait_valid, lambda: env.save("x")):
            with pytest.raises(DrumsError):
                ask()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(fake: FakeDaemon, status: int) -> None:
    """The token is not sent on, not even to the same machine."""
    with fake_daemon() as elsewhere:
        fake.script(".*", Answer(status, b"", {"Location": f"{elsewhere.url}/v1/health"}))
        for ask in ("health", "create"):
            with client_of(fake) as client, pytest.raises(DrumsError, match="redirected") as caught:
                getattr(client, ask)()
            assert elsewhere.url in str(caught.value) and TOKEN not in str(caught.value)
        assert elsewhere.asked == []


def test_proxies_of_the_environment_do_not_see_the_token(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loopback daemon is asked directly, and a netrc file is not read."""
    with fake_daemon() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        with client_of(fake) as client:
            assert client.health()["status"] == "ok"
        assert proxy.asked == [] and fake.asked[-1].headers["Authorization"] == f"Bearer {TOKEN}"


# --- tokens


def test_a_wrong_token(fake: FakeDaemon) -> None:
    """AuthError; health answers without one."""
    with drums.connect(fake.url, "drums_sk_wrong") as client, pytest.raises(AuthError, match="missing or wrong"):
        client.tasks()
    with drums.connect(fake.url, "") as client:
        assert client.health() == {"status": "ok", "version": "0.1.0"}
        assert "Authorization" not in fake.asked[-1].headers
        with pytest.raises(AuthError):
            client.slots()


def test_without_a_token_the_error_says_how_to_get_one(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the token file that was not there."""
    monkeypatch.setenv("DRUMS_STATE_DIR", "/nonexistent")
    monkeypatch.delenv("DRUMS_TOKEN", raising=False)
    with drums.connect(fake.url) as client, pytest.raises(AuthError, match=r"DRUMS_TOKEN.*'/nonexistent/token'"):
        client.slots()


def test_401_without_a_problem(fake: FakeDaemon) -> None:
    """A gateway in between answers in its own words."""
    fake.script(".*", Answer(401, b"who are you", {"Content-Type": "text/plain"}))
    with client_of(fake) as client, pytest.raises(AuthError, match="who are you"):
        client.slots()


# --- arguments


@pytest.mark.parametrize("name", ["", ".", "..", "../../metrics", "a/b"])
def test_names_that_would_be_another_route(fake: FakeDaemon, name: str) -> None:
    """Not found, without a request."""
    with client_of(fake) as client:
        with pytest.raises(TaskNotFound):
            client.task(name)
        with pytest.raises(SlotNotFound):
            client.slot(name)
        with pytest.raises(DrumsError):
            client.episode(name)
    assert fake.asked == []


def test_names_are_quoted(fake: FakeDaemon) -> None:
    """A name with any other character is asked for as it is."""
    with client_of(fake) as client, pytest.raises(SlotNotFound):
        client.slot("d?x=1#ü %2F")
    assert fake.asked[-1].path == "/v1/slots/d?x=1#ü %2F" and fake.asked[-1].query == {}


def test_what_is_no_json(fake: FakeDaemon) -> None:
    """NaN and objects: an error before anything is sent."""
    with client_of(fake) as client:
        for ttl in (float("nan"), float("inf"), object()):
            with pytest.raises(ConfigError, match="JSON"):
                client.create(ttl=ttl)  # type: ignore[arg-type]
        env = client.create()
        for data in ("text", 3, None):
            with pytest.raises(TypeError, match="expected bytes"):
                env.write_file("/x", data)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            client.task(7)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="makes no URL"):
            client.task("x" * 100_000)
    assert len(fake.asked) == 1


# --- connections


def unused_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


# httpcore2 leaves the socket of a failed unix connection to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket.socket:ResourceWarning")
@pytest.mark.parametrize("unix", [False, True])
def test_no_daemon(unix: bool) -> None:
    """The error names the URL and `drums serve`, and is a ConnectionError and a PrerequisiteError too."""
    where = "unix:/nonexistent/socket" if unix else f"http://127.0.0.1:{unused_port()}"
    with drums.connect(where, TOKEN) as client, pytest.raises(DaemonUnreachable) as caught:
        client.health()
    error = caught.value
    assert where in str(error) and "drums serve" in error.hint
    assert isinstance(error, ConnectionError) and isinstance(error, drums.PrerequisiteError)
    assert not error.may_have_arrived
    assert type(pickle.loads(pickle.dumps(error))) is DaemonUnreachable
    del error, caught
    gc.collect()


def test_a_daemon_that_does_not_speak_tls(fake: FakeDaemon) -> None:
    """https to a daemon that speaks plain HTTP; nothing of the request is sent."""
    with drums.connect(fake.url.replace("http", "https"), TOKEN) as client, pytest.raises(DaemonUnreachable):
        client.health()
    assert fake.asked == []


def test_a_dropped_connection_is_tried_again_with_the_same_key(fake: FakeDaemon) -> None:
    """Every mutating call has a key of its own, which its repetitions share; three tries in all."""
    with client_of(fake) as client:
        env = client.create(TASK)
        calls: dict[str, Callable[[], Any]] = {
            "POST /v1/slots": client.create,
            "POST .*/step": lambda: env.step("WAIT"),
            "POST .*/execute": lambda: env.execute("true"),
            "POST .*/verify": env.verify,
            "POST .*/reset": env.reset,
            "POST .*/fork": env.fork,
            "POST .*/save": lambda: env.save("x"),
            "POST .*/extend": lambda: env.extend(5),
            "PUT .*/files": lambda: env.write_file("/x", b"x"),
            "GET /v1/slots": client.slots,
        }
        for pattern, call in calls.items():
            fake.asked.clear()
            fake.script(pattern, Answer(drop=True), Answer(drop=True), lambda _: None)
            call()
            keys = {asked.headers.get("Idempotency-Key") for asked in fake.of(pattern)}
            assert len(fake.of(pattern)) == 3 and len(keys) == 1, pattern
            assert (keys == {None}) is not pattern.startswith("POST"), pattern
        assert (
            len({a.headers["Idempotency-Key"] for _ in range(3) if env.step("WAIT") for a in fake.of(".*/step")}) == 3
        )


def test_a_connection_that_is_dropped_for_good(fake: FakeDaemon) -> None:
    """The error says that the daemon may have acted."""
    fake.script(".*", Answer(drop=True))
    with client_of(fake) as client, pytest.raises(DaemonUnreachable, match="broke during POST /v1/slots") as caught:
        client.create()
    assert caught.value.may_have_arrived and len(fake.asked) == 3


def test_a_daemon_that_is_silent(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given up after the time limit, and not asked again: it may be busy with it."""
    monkeypatch.setattr("drums._calls.STEP_S", 0.05)
    enough = threading.Event()

    def when_told(_: Asked) -> None:
        enough.wait(10)

    fake.script("POST .*/step", when_told)
    with client_of(fake) as client:
        env = client.create()
        with pytest.raises(DaemonUnreachable, match=r"not answered POST .*/step within 0.05 s") as caught:
            env.step("WAIT")
        enough.set()
        assert caught.value.may_have_arrived and len(fake.of("POST .*/step")) == 1


# --- long calls


@pytest.mark.parametrize(
    "stream",
    [
        "event: result\ndata: {}\n\n",
        "data:{}\nevent:result\n\n",
        ":\n\nid: 7\nretry: 1\nevent: progress\ndata: {{\n\nevent: result\r\ndata: {}\r\n\r\n",
        "event: unknown\ndata: x\n\nevent: result\ndata: {}\n\nevent: result\ndata: 7\n\n",
    ],
)
def test_event_streams(fake: FakeDaemon, stream: str) -> None:
    """Comments, unknown events and fields are passed over, and the first result counts."""
    result = json.dumps({"status": 201, "body": a_slot("d-7")})
    body = stream.replace("{}", result).replace("{{", "{").encode()
    fake.script("POST /v1/slots", Answer(200, body, {"Content-Type": "text/event-stream"}))
    with client_of(fake) as client:
        assert client.create(TASK).id == "d-7"


def test_data_over_several_lines(fake: FakeDaemon) -> None:
    """As server-sent events have it."""
    lines = json.dumps({"status": 201, "body": a_slot("d-7")}, indent=1).splitlines()
    body = "event: result\n" + "".join(f"data: {line}\n" for line in lines) + "\n"
    fake.script("POST /v1/slots", Answer(200, body.encode(), {"Content-Type": "text/event-stream"}))
    with client_of(fake) as client:
        assert client.create(TASK).id == "d-7"


def test_a_problem_at_the_end_of_a_stream(fake: FakeDaemon) -> None:
    """Maps as the plain answer does."""
    document = {"status": 422, "code": "setup_failed", "detail": "step 3 failed", "facts": {"index": 3}}
    fake.script("POST /v1/slots", events(("progress", {}), ("problem", document)))
    with client_of(fake) as client, pytest.raises(drums.SetupFailed, match="step 3 failed") as caught:
        client.create(TASK)
    assert caught.value.index == 3


def test_a_plain_answer_to_a_long_call(fake: FakeDaemon) -> None:
    """A daemon may refuse before the stream begins, or not stream at all."""
    fake.streams = False
    with client_of(fake) as client:
        assert client.create(TASK).task_id == TASK
        fake.script("POST /v1/slots", problem("capacity_exhausted", 503, detail="32 of 32 desktops run"))
        with pytest.raises(drums.CapacityExhausted):
            client.create(TASK)


def test_a_stream_that_ends_early(fake: FakeDaemon) -> None:
    """Tried again with the same key; for good, it is a broken connection."""
    fake.script("POST /v1/slots", events(("progress", {})), lambda _: None)
    with client_of(fake) as client:
        assert client.create(TASK).task_id == TASK
        assert len({asked.headers["Idempotency-Key"] for asked in fake.of("POST /v1/slots")}) == 1
        fake.script("POST /v1/slots", events(("progress", {})))
        with pytest.raises(DaemonUnreachable, match="ended before the answer"):
            client.create(TASK)


@pytest.mark.parametrize("data", [b"nonsense", b"[]", b'{"body": {}}', b'{"status": "ok"}'])
def test_a_result_that_is_none(fake: FakeDaemon, data: bytes) -> None:
    """An error of drums."""
    body = b"event: result\ndata: " + data + b"\n\n"
    fake.script("POST /v1/slots", Answer(200, body, {"Content-Type": "text/event-stream"}))
    with client_of(fake) as client, pytest.raises(DrumsError, match="POST /v1/slots"):
        client.create(TASK)


# --- the asynchronous client raises the same


@pytest.mark.parametrize("run", [trio.run, lambda main: asyncio.run(main())], ids=["trio", "asyncio"])
def test_asynchronously(fake: FakeDaemon, run: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
    """Problems, redirects, streams and broken connections."""
    stranded = problem("slot_busy", 409, detail="busy")
    fake.script("POST .*/step", Answer(drop=True), stranded)
    fake.script("GET /v1/images", Answer(302, b"", {"Location": "http://127.0.0.1:1/"}))
    fake.script("GET /v1/plugins", Answer(drop=True))
    fake.script("POST .*/reset", events(("problem", {"status": 409, "code": "slot_busy", "detail": "busy"})))
    fake.script("POST .*/save", events(("progress", {})))

    async def main() -> None:
        async with drums.connect_async(fake.url, TOKEN) as client:
            env = await client.create(TASK)
            with pytest.raises(drums.SlotBusy):
                await env.step("WAIT")
            with pytest.raises(drums.SlotBusy):
                await env.reset()
            with pytest.raises(DrumsError, match="redirected"):
                await client.images()
            with pytest.raises(DaemonUnreachable, match="broke during"):
                await client.plugins()
            with pytest.raises(DaemonUnreachable, match="ended before the answer"):
                await env.save("x")
            with pytest.raises(ConfigError):
                await client.task("x" * 100_000)
        with pytest.raises(DrumsError, match="closed"):
            await client.health()
        async with drums.connect_async("unix:/nonexistent", TOKEN) as client:
            with pytest.raises(DaemonUnreachable, match="drums serve"):
                await client.health()
        async with drums.connect_async(fake.url, "drums_sk_wrong") as client:
            with pytest.raises(AuthError):
                await client.tasks()

    run(main)
    assert len(fake.of("GET /v1/plugins")) == 3


def test_tls_is_verified(tmp_path: Any, fake: FakeDaemon) -> None:
    """The context that plain connections are given trusts nobody."""
    options = _transport._wire_options(drums._endpoint.find_endpoint(fake.url, TOKEN))
    context: ssl.SSLContext = options["verify"]
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname and not context.get_ca_certs()


def test_the_fake_answers_tasks(fake: FakeDaemon) -> None:
    """The fake's documents are those that the client reads."""
    fake.script("GET /v1/tasks", as_json({"tasks": [a_task()], "broken": {}}))
    with client_of(fake) as client:
        assert client.tasks() == [a_task()] and client.broken_tasks() == {}
