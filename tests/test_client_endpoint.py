"""Where requests go and what token they carry: decided from text, before anything is sent."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

import drums
from drums._endpoint import DEFAULT_URL, find_endpoint
from drums.errors import ConfigError, InsecureTransport

TOKEN = "drums_sk_secret"
NOWHERE = {"DRUMS_STATE_DIR": "/nonexistent"}

LOOPBACK = [
    "http://127.0.0.1:7070",
    "http://127.0.0.1",
    "http://127.8.9.10:1",
    "http://localhost:7070",
    "http://LocalHost:7070",
    "HTTP://127.0.0.1:7070/",
    "http://[::1]:7070",
    "http://[0:0:0:0:0:0:0:1]:7070",
    "http://127.0.0.1:7070/drums/v",
]
NOT_LOOPBACK = [
    "http://example.com",
    "http://10.0.0.1:7070",
    "http://0.0.0.0:7070",
    "http://169.254.169.254",
    "http://192.168.0.1:7070/127.0.0.1",
    # Spellings that some resolver takes for loopback, and that another may not.
    "http://127.1:7070",
    "http://2130706433:7070",
    "http://0x7f000001:7070",
    "http://0177.0.0.1:7070",
    "http://127.0.0.01:7070",
    "http://127.0.0.1.:7070",
    "http://localhost.:7070",
    "http://localhost.localdomain:7070",
    "http://[::ffff:127.0.0.1]:7070",
    "http://[::]:7070",
    "http://[::2]:7070",
    # Names that begin or end as loopback does.
    "http://127.0.0.1.example.com",
    "http://127.0.0.1-example.com",
    "http://localhost.example.com",
    "http://notlocalhost",
    "http://xn--lcalhost-n4a:7070",
    "HTTP://EXAMPLE.COM:80",
]
MALFORMED = [
    "",
    " ",
    "127.0.0.1:7070",
    "localhost:7070",
    "//127.0.0.1:7070",
    "http:/127.0.0.1",
    "http://",
    "http://:7070",
    "ftp://127.0.0.1",
    "file:///etc/passwd",
    "javascript://127.0.0.1/",
    "http://127.0.0.1:0",
    "http://127.0.0.1:65536",
    "http://127.0.0.1:99999999999",
    "http://127.0.0.1:٧٠٧٠",
    "http://127.0.0.1:7070?x=1",
    "http://127.0.0.1:7070#example.com",
    "http://127.0.0.1:7070/../x",
    "http://127.0.0.1:7070/%2e%2e/x",
    # User names: what stands before an @ is no host.
    "http://127.0.0.1@example.com",
    "http://127.0.0.1:7070@example.com",
    "http://user:password@127.0.0.1",
    "http://@127.0.0.1",
    # What parsers disagree about.
    "http://example.com\\@127.0.0.1",
    "http://127.0.0.1\\.example.com",
    "http://127.0.0.1\t.example.com",
    "http://127.0.0.1\n",
    " http://127.0.0.1",
    "http://127.0.0.1 .example.com",
    "http://127.0.0.1%00.example.com",
    "http://127.0.0.1\0.example.com",
    "http://１２７.0.0.1",
    "http://127。0。0。1",
    "http://ⓛocalhost",
    "http://[::1%25eth0]:7070",
    "http://[::1]example.com",
    "http://[::1].example.com",
    "http://[127.0.0.1]:7070",
    "http://[zz]",
    "http://[:::1]",
    "unix:",
    "unix:relative/path",
    "unix://host/path",
    "unix:/a\0b",
]


@pytest.mark.parametrize("url", LOOPBACK)
def test_a_token_goes_to_loopback(url: str) -> None:
    """Plain HTTP to a loopback literal carries the token."""
    endpoint = find_endpoint(url, TOKEN, environ={})
    assert (endpoint.is_local, endpoint.token, endpoint.is_encrypted) == (True, TOKEN, False)


@pytest.mark.parametrize("url", NOT_LOOPBACK)
def test_no_token_over_plain_http(url: str) -> None:
    """Anything else is refused, says where, and never shows the token; each permission lets it pass, https too."""
    for token, environ in ((TOKEN, {}), (None, {"DRUMS_TOKEN": TOKEN}), (TOKEN, {"DRUMS_ALLOW_INSECURE_HTTP": "0"})):
        with pytest.raises(InsecureTransport) as caught:
            find_endpoint(url, token, environ=environ)
        assert TOKEN not in str(caught.value) and caught.value.url == url.lower()
    assert find_endpoint(url, TOKEN, allow_insecure_http=True, environ={}).token == TOKEN
    assert find_endpoint(url, TOKEN, environ={"DRUMS_ALLOW_INSECURE_HTTP": "1"}).token == TOKEN
    assert find_endpoint(url, environ={}).token is None  # and without a token there is nothing to protect
    secure = find_endpoint(f"https{url[4:]}", TOKEN, environ={})
    assert secure.is_encrypted and not secure.is_local


@pytest.mark.parametrize("url", MALFORMED)
def test_malformed(url: str) -> None:
    """A URL that parsers could read in two ways, or that is none, is refused, permission or not."""
    with pytest.raises(ConfigError) as caught:
        find_endpoint(url, TOKEN, allow_insecure_http=True, environ={})
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("url", [*LOOPBACK, *NOT_LOOPBACK])
def test_the_http_library_reads_the_same_host(url: str) -> None:
    """What is judged is what is connected to, where the library takes it at all."""
    endpoint = find_endpoint(url, environ=NOWHERE)
    try:
        parsed = httpx2.URL(endpoint.base_url)
    except httpx2.InvalidURL:
        with drums.connect(url) as client, pytest.raises(ConfigError):
            client.health()
        return
    host = endpoint.url.partition("://")[2].partition("/")[0]
    host = host[: host.rindex("]") + 1] if "]" in host else host.partition(":")[0]
    assert parsed.raw_host.decode() == host.strip("[]") and not parsed.userinfo


@given(st.text(alphabet="127.0:/@\\#?[]localhst%x\t ٧", min_size=1, max_size=24))
def test_any_text(rest: str) -> None:
    """Whatever is put after `http://`: if a token would be sent, the HTTP library connects to loopback."""
    try:
        endpoint = find_endpoint(f"http://{rest}", TOKEN, environ={})
    except (ConfigError, InsecureTransport):
        return
    host = httpx2.URL(endpoint.base_url).host
    assert host in ("localhost", "::1") or (host.startswith("127.") and socket.inet_pton(socket.AF_INET, host)), host


def test_defaults_and_environment() -> None:
    """Arguments win over the environment, and that over the defaults; empty variables are none."""
    assert find_endpoint(environ=NOWHERE).url == DEFAULT_URL == "http://127.0.0.1:7070"
    assert find_endpoint(environ={**NOWHERE, "DRUMS_URL": "", "DRUMS_TOKEN": ""}).url == DEFAULT_URL
    environ = {"DRUMS_URL": "http://127.0.0.1:1", "DRUMS_TOKEN": "drums_sk_env"}
    assert find_endpoint(environ=environ).url == "http://127.0.0.1:1"
    assert find_endpoint(environ=environ).token == "drums_sk_env"
    assert find_endpoint("http://127.0.0.1:2", TOKEN, environ=environ).url == "http://127.0.0.1:2"
    assert find_endpoint(token=TOKEN, environ=environ).token == TOKEN
    assert find_endpoint(token="", environ=environ).token is None


@pytest.mark.parametrize("token", ["a b", "a\r\nX-Evil: 1", "schlüssel", "a\0", "\x7f"])
def test_a_token_that_no_header_can_carry(token: str) -> None:
    """Refused without being shown; white space around it, as a file ends with, is not part of it."""
    with pytest.raises(ConfigError) as caught:
        find_endpoint("http://127.0.0.1", token, environ={})
    assert token not in str(caught.value)
    assert find_endpoint("http://127.0.0.1", f"{TOKEN}\n", environ={}).token == TOKEN


def test_the_token_is_not_shown() -> None:
    """Neither the endpoint's nor the client's repr has it."""
    assert TOKEN not in repr(find_endpoint("http://127.0.0.1", TOKEN, environ={}))
    with drums.connect("http://127.0.0.1:1", TOKEN) as client:
        assert TOKEN not in repr(client)


def test_unix_sockets() -> None:
    """`unix:/path`, and `unix:///path` means the same; it is local whatever the path says."""
    for url in ("unix:/run/drums.sock", "unix:///run/drums.sock"):
        endpoint = find_endpoint(url, TOKEN, environ={})
        assert (endpoint.socket, endpoint.is_local, endpoint.token) == ("/run/drums.sock", True, TOKEN)
        assert endpoint.url == "unix:/run/drums.sock"


def test_the_token_file_is_for_local_daemons_only(tmp_path: Path) -> None:
    """Read for loopback and unix sockets alone; an own token, even an empty one, wins over it."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    environ = {"DRUMS_STATE_DIR": str(tmp_path)}
    for url in (*LOOPBACK, "unix:/x"):
        assert find_endpoint(url, environ=environ).token == TOKEN
    for url in (*NOT_LOOPBACK, "https://example.com", "https://127.0.0.1.example.com"):
        assert find_endpoint(url, environ=environ).token is None, url
    assert find_endpoint(environ={**environ, "DRUMS_TOKEN": "drums_sk_env"}).token == "drums_sk_env"
    assert find_endpoint(token="", environ=environ).token is None


def test_a_token_file_that_cannot_be_read(tmp_path: Path) -> None:
    """No token then, and the hint says what to do; it is told once the daemon asks for one."""
    missing = find_endpoint(environ={"DRUMS_STATE_DIR": str(tmp_path)})
    assert missing.token is None and str(tmp_path / "token") in missing.token_hint
    (tmp_path / "token").mkdir()
    unreadable = find_endpoint(environ={"DRUMS_STATE_DIR": str(tmp_path)})
    assert unreadable.token is None and os.strerror(21) in unreadable.token_hint
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "token").write_bytes(b"\xff\xfe")
    assert find_endpoint(environ={"DRUMS_STATE_DIR": str(tmp_path / "other")}).token is None


def test_refused_before_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """connect() itself raises, synchronous or not, and no name is looked up."""

    def no_lookup(*_: object, **__: object) -> None:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", no_lookup)
    monkeypatch.setenv("DRUMS_URL", "http://drums.example.com:7070")
    monkeypatch.setenv("DRUMS_TOKEN", TOKEN)
    for connect in (drums.connect, drums.connect_async):
        with pytest.raises(drums.InsecureTransport):
            connect()
        connect(allow_insecure_http=True)
    monkeypatch.setenv("DRUMS_ALLOW_INSECURE_HTTP", "1")
    drums.connect().close()
