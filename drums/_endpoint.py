"""Where the daemon is and what proves who asks: the rules on URLs and tokens, judged before any request is made.

A URL is taken apart by one strict pattern and put together again from its parts, so that no two parsers can disagree
on which host a token goes to.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from drums.errors import ConfigError, InsecureTransport

DEFAULT_URL = "http://127.0.0.1:7070"
DEFAULT_STATE_DIR = "/var/lib/drums"

_URL = re.compile(
    r"(?P<scheme>[a-z]+)://"
    r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9][a-z0-9._-]*)"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>(?:/[a-z0-9._~-]*)*)",
    re.ASCII | re.IGNORECASE,
)
_TOKEN = re.compile(r"[\x21-\x7e]+", re.ASCII)


@attrs.frozen
class Endpoint:
    """A daemon's address with the token for it.

    Args:
        url: as it is shown to people, and what requests begin with unless `socket` is there.
        socket: the path of a unix socket, or None.
        is_local: whether it is a loopback literal, `localhost` or a unix socket.
        token: the bearer token, None when there is none.
        token_hint: what to do when the daemon refuses the token.
    """

    url: str
    socket: str | None
    is_local: bool
    token: str | None = attrs.field(repr=False)
    token_hint: str = ""

    @property
    def base_url(self) -> str:
        """What the paths of requests are appended to."""
        return "http://drums" if self.socket is not None else self.url

    @property
    def is_encrypted(self) -> bool:
        """Whether TLS is spoken."""
        return self.url.startswith("https://")


def find_endpoint(
    url: str | None = None,
    token: str | None = None,
    *,
    allow_insecure_http: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Endpoint:
    """The daemon to talk to, from arguments, then `DRUMS_URL` and `DRUMS_TOKEN`, then the defaults.

    Args:
        url: `http://…`, `https://…` or `unix:/path`.
        token: an empty one means to send none.
        allow_insecure_http: let a token travel over plain HTTP to another machine.
        environ: the environment.

    Raises:
        ConfigError: the URL or the token is malformed.
        InsecureTransport: the token would travel over plain HTTP to a host that is no loopback literal.
    """
    environ = os.environ if environ is None else environ
    if url is None:
        url = environ.get("DRUMS_URL") or DEFAULT_URL
    plain = _parse(url)
    given = token if token is not None else (environ.get("DRUMS_TOKEN") or None)
    hint = "set DRUMS_TOKEN, or pass token="
    if given is None and plain.is_local:
        given, hint = _token_of_local_daemon(environ)
    endpoint = attrs.evolve(plain, token=_checked_token(given), token_hint=hint)
    allowed = allow_insecure_http or environ.get("DRUMS_ALLOW_INSECURE_HTTP") == "1"
    if endpoint.token and not (endpoint.is_local or endpoint.is_encrypted or allowed):
        raise InsecureTransport(
            f"the token would travel over plain HTTP to {endpoint.url!r}, which is no loopback address",
            hint="use https://, or a tunnel to 127.0.0.1; allow_insecure_http=True or DRUMS_ALLOW_INSECURE_HTTP=1"
            " sends it all the same",
            url=endpoint.url,
        )
    return endpoint


def _parse(url: str) -> Endpoint:
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not re.match("/[^/]", path) or "\0" in path:
            raise ConfigError(f"{url!r} names no unix socket, expected unix:/path", path="DRUMS_URL")
        return Endpoint(f"unix:{path}", path, True, None)
    match = _URL.fullmatch(url)
    if match is None:
        # Not quoted: what stands before an @ may be a password.
        shown = "it has a user name or an @" if "@" in url else f"it is {url!r}"
        raise ConfigError(
            f"the daemon's URL is not understood: {shown}; expected http://HOST:PORT, https://HOST:PORT or unix:/path",
            path="DRUMS_URL",
        )
    scheme, host, path = match["scheme"].lower(), match["host"].lower(), match["path"].rstrip("/")
    port = int(match["port"]) if match["port"] else None
    if scheme not in ("http", "https"):
        raise ConfigError(f"the daemon's URL {url!r} begins with {scheme!r}, expected http, https or unix", path="$")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"the daemon's URL {url!r} has port {port}, expected 1 to 65535", path="DRUMS_URL")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError as e:
            raise ConfigError(f"the daemon's URL {url!r} has a wrong IPv6 address: {e}", path="DRUMS_URL") from e
    if {".", ".."} & set(path.split("/")):
        raise ConfigError(f"the daemon's URL {url!r} has dots for a folder", path="DRUMS_URL")
    rebuilt = f"{scheme}://{host}{f':{port}' if port else ''}{path}"
    return Endpoint(rebuilt, None, _is_loopback(host), None)


def _is_loopback(host: str) -> bool:
    """Whether this literal is the machine itself, however a resolver is set up.

    Other spellings that a resolver may take for loopback (`127.1`, `2130706433`, `localhost.`) are not: then a token is
    rather refused than sent.
    """
    if host == "localhost":
        return True
    try:
        if host.startswith("["):
            return ipaddress.IPv6Address(host[1:-1]) == ipaddress.IPv6Address("::1")
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def state_dir(environ: Mapping[str, str]) -> Path:
    """The local daemon's folder."""
    return Path(environ.get("DRUMS_STATE_DIR") or DEFAULT_STATE_DIR)


def _token_of_local_daemon(environ: Mapping[str, str]) -> tuple[str | None, str]:
    path = state_dir(environ) / "token"
    try:
        return path.read_text("ascii").strip() or None, f"{str(path)!r} holds another daemon's token: set DRUMS_TOKEN"
    except FileNotFoundError:
        return None, f"set DRUMS_TOKEN: there is no token file {str(path)!r}"
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is no text"
        return None, f"set DRUMS_TOKEN, or run as root: the token file {str(path)!r} cannot be read: {reason}"


def _checked_token(token: str | None) -> str | None:
    token = token.strip() if token else None
    if token and not _TOKEN.fullmatch(token):
        raise ConfigError("the token has characters that no HTTP header can carry", path="DRUMS_TOKEN")
    return token or None
