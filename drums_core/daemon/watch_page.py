"""The page at `/`, to watch desktops in a browser: three static files, which hold no secret.

The page asks for the token and calls `/v1` with it, as any client. The content policy lets it run nothing but its own
script and send nothing anywhere but here; what desktops and tasks say cannot become markup.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from drums_core.daemon.answers import Answer, Plain

_FILES = {
    "/": ("watch.html", "text/html; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
}
PATHS = tuple(_FILES)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """The routes of the page's files."""
    return [Route(path, _endpoint(*about), methods=["GET"]) for path, about in _FILES.items()]


def _endpoint(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("drums_core.daemon").joinpath("watch", name).read_bytes()

    async def show(_: Request) -> Response:
        return Plain(Answer(200, content, media_type, _HEADERS))

    return show
