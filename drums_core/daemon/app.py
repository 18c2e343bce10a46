"""The application: the routes' table on Starlette, with bodies checked, errors told and keys honoured."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Awaitable, Callable

import attrs
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from drums.errors import ConfigError
from drums_core.daemon import openapi
from drums_core.daemon.answers import Answer, EventFeed, Following, LongCall, Plain, refusal
from drums_core.daemon.codec import parse_json, structure, structure_query
from drums_core.daemon.guard import Guard
from drums_core.daemon.idempotency import Ledger
from drums_core.daemon.metrics import Metrics
from drums_core.daemon.operations import Call, Operation, to_its_end
from drums_core.daemon.port_websocket import serve_port
from drums_core.daemon.problems import MethodNotAllowed, NotFound
from drums_core.daemon.requests import Nothing
from drums_core.daemon.routes import OPERATIONS
from drums_core.daemon.watch_page import page_routes
from drums_core.host import Host

_KEY = re.compile(r"[!-~]{1,255}")


@attrs.define(eq=False)
class Daemon:
    """What the routes of one daemon share.

    Args:
        nursery: of the daemon's life: what must go on when its caller leaves runs here.
    """

    host: Host
    nursery: trio.Nursery
    metrics: Metrics
    ledger: Ledger = attrs.field(factory=Ledger)

    def endpoint(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        """A route's endpoint."""

        async def endpoint(request: Request) -> Response:
            try:
                return await self._respond(operation, request)
            except Exception as e:  # noqa: BLE001 - every error is an answer
                return Plain(refusal(e))

        return endpoint

    async def _respond(self, operation: Operation, request: Request) -> Response:
        content = await request.body()
        call = Call(
            host=self.host,
            metrics=self.metrics,
            nursery=self.nursery,
            parameters=request.path_params,
            body=_body(operation, content),
            query=_query(operation, request),
            request=request,
            authorized=request.scope["state"]["authorized"],
            following=Following(),
        )
        if operation.answer == "text/event-stream":
            feed = await operation.handler(call)
            assert isinstance(feed, EventFeed)
            return feed
        run, on_loss = self._with_key(operation, request, content, lambda: self._answer(operation, call))
        if operation.long and "text/event-stream" in request.headers.get("accept", ""):
            return LongCall(self.host, call.following, run, on_loss=on_loss)
        return Plain(await run(), on_loss=on_loss)

    async def _answer(self, operation: Operation, call: Call) -> Answer:
        began = time.monotonic()
        try:
            found = await operation.handler(call)
            answer = found if isinstance(found, Answer) else Answer(operation.status, found)
        except Exception as e:  # noqa: BLE001 - every error is an answer
            answer = refusal(e)
        outcome = "done" if answer.status < 400 else "refused" if answer.status < 500 else "failed"
        if operation.mutating:
            self.metrics.seconds.labels(operation.name, outcome).observe(time.monotonic() - began)
        return answer

    def _with_key(
        self, operation: Operation, request: Request, content: bytes, run: Callable[[], Awaitable[Answer]]
    ) -> tuple[Callable[[], Awaitable[Answer]], Callable[[], None]]:
        """What answers a call once for all that bear its key, and what is called when its answer is lost."""
        key = request.headers.get("idempotency-key")
        if key is None or not operation.mutating:
            return run, lambda: None
        if not _KEY.fullmatch(key):
            fault = {"path": "$header.Idempotency-Key", "message": "expected 1 to 255 printable characters"}
            raise ConfigError("the idempotency key is malformed", path=fault["path"], errors=[fault])
        hasher = hashlib.sha256()
        for part in (operation.method, request.url.path, request.url.query, content):
            data = part if isinstance(part, bytes) else part.encode()
            hasher.update(b"%d:" % len(data) + data)

        async def kept() -> Answer:
            return await self.ledger.answer(key, hasher.digest(), run)

        async def to_the_end() -> Answer:
            return await to_its_end(self.nursery, kept)

        return to_the_end if operation.acts else kept, lambda: self.ledger.forget(key)


def _body(operation: Operation, content: bytes) -> object:
    if operation.raw_body:
        return content
    return structure(parse_json(content), operation.body or Nothing)


def _query(operation: Operation, request: Request) -> object:
    if operation.of_port:  # the program's in the desktop
        return Nothing()
    return structure_query(list(request.query_params.multi_items()), operation.query or Nothing)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        answer = refusal(MethodNotAllowed(f"{what}: this route takes {(error.headers or {}).get('Allow', 'others')}"))
        answer.headers = dict(error.headers or {})
    elif error.status_code == 404:
        answer = refusal(NotFound(f"no route {what}", hint="the routes are listed at /openapi.json"))
    else:
        answer = refusal(ConfigError(f"{what}: {error.detail}", path="$"))
    return Plain(answer)


def _websocket_route(daemon: Daemon) -> WebSocketRoute:
    async def serve(websocket: WebSocket) -> None:
        await serve_port(daemon.host, websocket)

    (path,) = {operation.route for operation in OPERATIONS if operation.of_port}
    return WebSocketRoute(path, serve, name="websocket_port")


def make_app(daemon: Daemon, token: str, stopping: trio.Event) -> Guard:
    """The whole application."""
    document = openapi.document(OPERATIONS)

    async def show_document(_: Request) -> Response:
        return Plain(Answer(200, document))

    routes = [Route(o.route, daemon.endpoint(o), methods=[o.method], name=o.name) for o in OPERATIONS]
    routes.append(Route("/openapi.json", show_document, methods=["GET"]))
    routes += page_routes()
    for route in routes:
        assert route.methods is not None
        route.methods.discard("HEAD")  # Starlette's own addition; of a stream it would never end
    app = Starlette(routes=[*routes, _websocket_route(daemon)], exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    return Guard(app, token, stopping, daemon.metrics.request)
