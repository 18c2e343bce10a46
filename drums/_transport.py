"""How requests travel: what httpx2 is given and what its errors say, and the two transports."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import attrs

import drums
from drums._endpoint import Endpoint
from drums._eventloop import sleep
from drums._flows import QUICK_S, Flow, Pause, Reply, Request, T
from drums.errors import AuthError, ConfigError, DaemonUnreachable, DrumsError

if TYPE_CHECKING:
    import httpx2

CONNECT_TIMEOUT_S = 10.0
# The server closes a quiet connection after 5 s; one that is given up earlier cannot be closed under a request.
_KEEPALIVE_S = 2.0


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
