"""How requests travel: values for request and reply, problems as exceptions, retries, and the two transports.

All that decides is here once, as *flows*: generators that yield requests and pauses and return what the caller wants.
`SyncTransport` and `AsyncTransport` only carry out what a flow yields.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

import drums
from drums import errors
from drums._endpoint import Endpoint
from drums._eventloop import sleep
from drums.errors import AuthError, ConfigError, DaemonUnreachable, DrumsError

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
QUICK_S = 60.0  # a daemon that is alive answers in milliseconds, and says every 15 s that a long call goes on
PAUSES_S = (0.1, 0.4)  # before the second and the third try

# The server closes a quiet connection after 5 s; one that is given up earlier cannot be closed under a request.
_KEEPALIVE_S = 2.0


@attrs.frozen
class Request:
    """What is asked.

    Args:
        method: GET, POST, PUT or DELETE.
        path: below the base URL, quoted.
        body: what to send as JSON, or bytes as they are; None is no body.
        params: the query.
        read_timeout_s: seconds of silence after which the daemon is given up.
        is_long: ask for the answer as an event stream, which is never silent for long.
        key: an idempotency key, "" for none: with it the daemon answers a repetition as it did the first time.
            Every request can be repeated: what changes something has a key, or is the same done twice.
    """

    method: str
    path: str
    body: Any = None
    params: Mapping[str, str] = attrs.field(factory=dict)
    read_timeout_s: float = QUICK_S
    is_long: bool = False
    key: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def post(path: str, body: Any = None, *, read_timeout_s: float = QUICK_S, is_long: bool = False) -> Request:
    """A request that changes something, with a key of its own."""
    key = f"drums-{uuid.uuid4().hex}"
    return Request("POST", path, body, read_timeout_s=read_timeout_s, is_long=is_long, key=key)


@attrs.frozen
class Reply:
    """What was answered."""

    request: Request
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            DrumsError: it is none, so whatever answered is no drums daemon.
        """
        try:
            return json.loads(self.body)
        except ValueError as e:
            raise DrumsError(
                f"{self.request} was answered with something else than JSON: {_excerpt(self)}",
                hint="is the URL that of a drums daemon?",
            ) from e

    def field(self, name: str, kind: type[T]) -> T:
        """One field of the JSON object.

        Raises:
            DrumsError: it is not there, or something else.
        """
        document = self.json()
        value = document.get(name) if isinstance(document, dict) else None
        if not isinstance(value, kind):
            raise DrumsError(f"{self.request} was answered without {name!r} as {kind.__name__}: {_excerpt(self)}")
        return value

    def object(self) -> dict[str, Any]:
        """The JSON object.

        Raises:
            DrumsError: it is something else.
        """
        document = self.json()
        if not isinstance(document, dict):
            raise DrumsError(f"{self.request} was answered with {type(document).__name__}, expected an object")
        return document


@attrs.frozen
class Pause:
    """Wait so many seconds."""

    seconds: float


Flow = Generator[Request | Pause, Any, T]


def ask(request: Request) -> Flow[Reply]:
    """Send, again if that is safe, until there is an answer.

    Raises:
        DrumsError: what the daemon's problem document says, or `DaemonUnreachable`.
    """
    pauses = list(PAUSES_S)
    while True:
        try:
            reply: Reply = yield request
        except DaemonUnreachable as e:
            if not pauses or not e.again:
                raise
            yield Pause(pauses.pop(0))
            continue
        if reply.status >= 300:
            raise error_of(reply)
        return reply


# --- problems


def _classes(root: type[DrumsError]) -> dict[str, type[DrumsError]]:
    found = {root.code: root}
    for sub in root.__subclasses__():
        # A class without a code of its own is its parent on the wire; others' classes are not the wire's business.
        if sub.__module__ == errors.__name__ and "code" in vars(sub):
            found |= _classes(sub)
    return found


def error_of(reply: Reply) -> DrumsError:
    """The exception for an answer that is no success: by the problem's code, else by the status."""
    if 300 <= reply.status < 400:
        return DrumsError(
            f"{reply.request} was redirected to {reply.headers.get('location', '')!r}; redirects are not followed,"
            " so that the token stays with the daemon it is for",
            hint="set DRUMS_URL to the daemon's own address",
            status=reply.status,
        )
    problem = _problem(reply)
    code = problem.get("code")
    kind = _classes(DrumsError).get(code) if isinstance(code, str) else None
    if kind is None and reply.status == 401:
        kind = AuthError
    facts = dict(problem["facts"]) if isinstance(problem.get("facts"), dict) else {}
    if isinstance(problem.get("errors"), list):
        facts.setdefault("errors", problem["errors"])
    detail = problem.get("detail") or problem.get("title") or f"{reply.request} failed: {_excerpt(reply)}"
    if kind is None:
        kind = DrumsError
        facts.update(status=reply.status, code=code)
    if isinstance(facts.get("reward"), dict):
        facts["reward"] = reward_of(facts["reward"])
    error = kind(str(detail), hint=str(problem.get("hint") or ""))
    error.facts = facts  # not as keywords: a fact may have any name
    if kind is DrumsError:
        vars(error).update(status=reply.status, code=code or DrumsError.code)
    return error


def _problem(reply: Reply) -> dict[str, Any]:
    try:
        document = json.loads(reply.body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _excerpt(reply: Reply) -> str:
    kind = reply.headers.get("content-type", "no content type")
    return f"status {reply.status}, {kind}, {reply.body[:200].decode('utf-8', 'replace')!r}"


def reward_of(document: Mapping[str, Any]) -> Any:
    """The `Reward` of a JSON object.

    Raises:
        DrumsError: it is none.
    """
    import cattrs  # 40 ms that only verify needs

    from drums.reward import Reward

    try:
        return cattrs.structure(document, Reward)
    except (cattrs.BaseValidationError, ValueError, TypeError, KeyError) as e:
        faults = cattrs.transform_error(e) if isinstance(e, cattrs.BaseValidationError) else [str(e)]
        raise DrumsError(f"the daemon's reward is not understood: {'; '.join(faults)}") from e


# --- the wire


def _options(endpoint: Endpoint) -> dict[str, Any]:
    """What both clients of httpx2 are made with."""
    headers = {"User-Agent": f"drums/{drums.__version__}", "Accept": "application/json, */*"}
    if endpoint.token:
        headers["Authorization"] = f"Bearer {endpoint.token}"
    return {
        "base_url": endpoint.base_url,
        "headers": headers,
        # A redirect could carry the token to another host.
        "follow_redirects": False,
        "limits": _limits(),
        # Proxies and netrc of the environment: never where the token travels in the clear or stays on this machine.
        "trust_env": endpoint.is_encrypted,
    }


def _limits() -> httpx2.Limits:
    """As many connections as there are calls under way."""
    import httpx2

    return httpx2.Limits(keepalive_expiry=_KEEPALIVE_S)


def _wire_options(endpoint: Endpoint) -> dict[str, Any]:
    """What the transport of a connection without TLS is made with."""
    import ssl

    return {
        "uds": endpoint.socket,
        # Not used; and an empty context trusts nobody, and is there in no time.
        "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        "trust_env": False,
        "limits": _limits(),
        "socket_options": None if endpoint.socket is not None else _keepalive(),
    }


def _keepalive() -> list[tuple[int, int, int]]:
    """A daemon's machine that is gone is noticed in about a minute, also in the middle of a long call."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS calls the first one otherwise
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def _arguments(request: Request) -> dict[str, Any]:
    """A request as httpx2 takes it.

    Raises:
        ConfigError: the body is no JSON.
    """
    import httpx2

    headers = {"Idempotency-Key": request.key} if request.key else {}
    if request.is_long:
        headers["Accept"] = "text/event-stream, application/json"
    content: bytes | None = None
    if isinstance(request.body, bytes):
        content = request.body
        headers["Content-Type"] = "application/octet-stream"
    elif request.body is not None:
        try:
            content = json.dumps(request.body, allow_nan=False).encode()
        except (TypeError, ValueError) as e:
            raise ConfigError(f"{request} cannot be sent as JSON: {e}", path="$") from e
        headers["Content-Type"] = "application/json"
    timeout = httpx2.Timeout(QUICK_S, connect=CONNECT_TIMEOUT_S, read=request.read_timeout_s)
    # The path is quoted already, and appended to the base URL by httpx2.
    return {
        "method": request.method,
        "url": request.path,
        "content": content,
        "params": dict(request.params) or None,
        "headers": headers,
        "timeout": timeout,
    }


def _is_stream(response: httpx2.Response) -> bool:
    kind: str = response.headers.get("content-type", "")
    return response.status_code == 200 and kind.partition(";")[0].strip() == "text/event-stream"


def _reply(request: Request, response: httpx2.Response) -> Reply:
    return Reply(request, response.status_code, response.headers, response.content)


@attrs.define
class StreamReader:
    """Takes all lines of a long call's event stream; the first `result` or `problem` in it is the answer."""

    request: Request
    answer: tuple[str, str] | None = None
    _event: str = ""
    _data: list[str] = attrs.field(factory=list)

    def take(self, line: str) -> None:
        """One line. Nothing is raised here: an asynchronous stream has to be read to its end."""
        if not line:
            if self._event in ("result", "problem") and self.answer is None:
                self.answer = self._event, "\n".join(self._data)
            self._event, self._data = "", []
            return
        name, _, value = line.partition(":")  # without a name it is a comment: the call goes on
        value = value.removeprefix(" ")
        if name == "event":
            self._event = value
        elif name == "data":
            self._data.append(value)

    def reply(self, endpoint: Endpoint) -> Reply:
        """The answer, as if it had come without a stream.

        Raises:
            DaemonUnreachable: the stream ended before there was one.
            DrumsError: it is none.
        """
        if self.answer is None:
            raise _broken("the stream ended before the answer", self.request, endpoint)
        event, data = self.answer
        document = Reply(self.request, 200, {"content-type": "text/event-stream"}, data.encode()).object()
        status = document.get("status")
        if not isinstance(status, int):
            raise DrumsError(f"{self.request} was answered with an event without a status: {data[:200]!r}")
        body = document if event == "problem" else document.get("body")
        return Reply(self.request, status, {"content-type": "application/json"}, json.dumps(body).encode())


def _unreachable(error: httpx2.TransportError, request: Request, endpoint: Endpoint) -> DaemonUnreachable:
    import httpx2

    url = endpoint.url
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.UnsupportedProtocol):
        start = "start one with `sudo drums serve`" if endpoint.is_local else "see whether `drums serve` runs there"
        return DaemonUnreachable(
            f"no drums daemon answers at {url!r}: {error or type(error).__name__}",
            hint=f"{start}, or set DRUMS_URL to where one is",
            url=url,
            may_have_arrived=False,
            again=isinstance(error, httpx2.ConnectError) and "CERTIFICATE" not in str(error),
        )
    if isinstance(error, httpx2.ReadTimeout):
        said = f"the daemon at {url!r} has not answered {request} within {request.read_timeout_s:g} s"
        return DaemonUnreachable(said, url=url, may_have_arrived=True, again=False)
    return _broken(str(error) or type(error).__name__, request, endpoint)


def _broken(reason: str, request: Request, endpoint: Endpoint) -> DaemonUnreachable:
    return DaemonUnreachable(
        f"the connection to the daemon at {endpoint.url!r} broke during {request}: {reason}",
        hint="see the daemon's log",
        url=endpoint.url,
        may_have_arrived=True,
        again=True,
    )


def _no_url(error: httpx2.InvalidURL, request: Request, endpoint: Endpoint) -> ConfigError:
    said = f"{request} of {endpoint.url!r} makes no URL: {error}"
    return ConfigError(said if len(said) < 300 else f"{said[:100]}… makes no URL: {error}", path="DRUMS_URL")


def _closed(endpoint: Endpoint) -> DrumsError:
    return DrumsError(f"this client of {endpoint.url!r} is closed", hint="make another with drums.connect()")


def _explain(error: DrumsError, endpoint: Endpoint) -> DrumsError:
    """Where the token comes from is known here alone."""
    if isinstance(error, AuthError) and (not error.hint or endpoint.token is None):
        error.hint = endpoint.token_hint
    return error


class SyncTransport:
    """Carries out flows, in this thread. Several threads may use one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.is_closed = False
        self._http: httpx2.Client | None = None
        self._connecting = threading.Lock()

    def run(self, flow: Flow[T]) -> T:
        """Carry out to the end and return the flow's result; its errors are the caller's."""
        try:
            step = next(flow)
            while True:
                try:
                    answer = self._do(step)
                except DaemonUnreachable as e:
                    step = flow.throw(e)
                else:
                    step = flow.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        except DrumsError as e:
            raise _explain(e, self.endpoint) from e.__cause__

    def _do(self, step: Request | Pause) -> Reply | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        import httpx2

        if self.is_closed:
            raise _closed(self.endpoint)
        reader = StreamReader(step)
        try:
            with self._connecting:
                if self._http is None:
                    self._http = self._connect()
            with self._http.stream(**_arguments(step)) as response:
                if not _is_stream(response):
                    response.read()
                    return _reply(step, response)
                for line in response.iter_lines():
                    reader.take(line)
        except httpx2.TransportError as e:
            if reader.answer is None:
                raise _unreachable(e, step, self.endpoint) from e
        except httpx2.InvalidURL as e:
            raise _no_url(e, step, self.endpoint) from e
        return reader.reply(self.endpoint)

    def _connect(self) -> httpx2.Client:
        import httpx2

        plain = not self.endpoint.is_encrypted
        transport = httpx2.HTTPTransport(**_wire_options(self.endpoint)) if plain else None
        return httpx2.Client(**_options(self.endpoint), transport=transport)

    def close(self) -> None:
        """Close the connections; twice is once."""
        self.is_closed = True
        if self._http is not None:
            self._http.close()


class AsyncTransport:
    """Carries out flows on trio or asyncio, whichever runs."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.is_closed = False
        self._http: httpx2.AsyncClient | None = None

    async def run(self, flow: Flow[T]) -> T:
        """Carry out to the end and return the flow's result; its errors are the caller's."""
        try:
            step = next(flow)
            while True:
                try:
                    answer = await self._do(step)
                except DaemonUnreachable as e:
                    step = flow.throw(e)
                else:
                    step = flow.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        except DrumsError as e:
            raise _explain(e, self.endpoint) from e.__cause__

    async def _do(self, step: Request | Pause) -> Reply | None:
        if isinstance(step, Pause):
            await sleep(step.seconds)
            return None
        import httpx2

        if self.is_closed:
            raise _closed(self.endpoint)
        reader = StreamReader(step)
        try:
            if self._http is None:
                self._http = self._connect()
            async with self._http.stream(**_arguments(step)) as response:
                if not _is_stream(response):
                    await response.aread()
                    return _reply(step, response)
                async for line in response.aiter_lines():
                    reader.take(line)
        except httpx2.TransportError as e:
            if reader.answer is None:
                raise _unreachable(e, step, self.endpoint) from e
        except httpx2.InvalidURL as e:
            raise _no_url(e, step, self.endpoint) from e
        return reader.reply(self.endpoint)

    def _connect(self) -> httpx2.AsyncClient:
        import httpx2

        plain = not self.endpoint.is_encrypted
        transport = httpx2.AsyncHTTPTransport(**_wire_options(self.endpoint)) if plain else None
        return httpx2.AsyncClient(**_options(self.endpoint), transport=transport)

    async def close(self) -> None:
        """Close the connections; twice is once."""
        self.is_closed = True
        if self._http is not None:
            await self._http.aclose()
