"""The browser and VLC of the image `osworld` through a real daemon, as `docs/http.md` tells users to reach them."""

from __future__ import annotations

import base64
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message

import pytest
from apps import APPS
from requires import requires
from served import served

import drums

pytestmark = [requires("root", "criu", "osworld"), pytest.mark.applications]

BROWSER = "google-chrome --remote-debugging-port=1337 file:///home/user/page.html"
RELAY = "socat tcp-listen:9222,fork tcp:localhost:1337"
PLAYER = "vlc --no-audio --no-video-title-show /home/user/film.mp4"
PASSWORD = {"X-Drums-Port-Authorization": "Basic " + base64.b64encode(b":password").decode()}
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[drums.Env]:
    """A desktop of a daemon in a process of its own, in which both run."""
    with (
        served(tmp_path_factory.mktemp("daemon") / "log") as daemon,
        drums.connect(daemon.url, daemon.token) as client,
        client.create(image="osworld", ttl=900) as env,
    ):
        for script in (APPS["chromium"].prepare, APPS["vlc"].prepare):
            assert env.execute(script, shell=True)["returncode"] == 0
        for command in (BROWSER, RELAY, PLAYER):
            env.execute(f"setsid {command} >/dev/null 2>&1 </dev/null &", shell=True)
        yield env


def get(url: str, headers: Mapping[str, str]) -> tuple[int, Message, str]:
    """Status, header and text of a reply."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=60) as reply:
            return reply.status, reply.headers, reply.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.headers, e.read().decode()


def wait_for(url: str, headers: Mapping[str, str], text: str) -> str:
    """The reply once it has this text."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        status, _, found = get(url, headers)
        if status == 200 and text in found:
            return found
        assert time.monotonic() < deadline, (status, found)
        time.sleep(0.2)


def test_playwright_drives_the_browser(env: drums.Env) -> None:
    """It reads a page, and changes it; with a wrong token it reaches nothing."""
    api = pytest.importorskip("playwright.sync_api")
    address = env.port(9222)
    wait_for(f"{address.url}/json", address.headers, "page.html")
    with api.sync_playwright() as playwright:
        with pytest.raises(api.Error, match="401"):
            playwright.chromium.connect_over_cdp(address.url, headers={"Authorization": "Bearer drums_sk_wrong"})
        browser = playwright.chromium.connect_over_cdp(address.url, headers=dict(address.headers))
        ((page,),) = [context.pages for context in browser.contexts]
        assert page.title() == "A page" and page.inner_text("h1") == "Hello"
        page.evaluate("document.title = 'Changed from outside'")
        browser.close()
    shown = "wmctrl -l | grep -q 'Changed from outside - Google Chrome'"  # a little later
    waited = env.execute(f"for i in $(seq 100); do {shown} && exit; sleep 0.1; done; exit 1", shell=True)
    assert waited["returncode"] == 0, env.execute("wmctrl -l", shell=True)


def test_vlc_tells_what_it_plays(env: drums.Env) -> None:
    """With its own password beside the daemon's token; and does what it is told."""
    address = env.port(8080)
    status = f"{address.url}/requests/status.xml"
    playing = wait_for(status, {**address.headers, **PASSWORD}, "<state>playing</state>")
    assert "film.mp4" in playing
    wait_for(f"{status}?command=pl_forcepause", {**address.headers, **PASSWORD}, "<state>paused</state>")
    code, fields, _ = get(status, address.headers)
    assert code == 401 and "X-Drums-Port" in fields, "VLC refuses without its password"
    code, fields, _ = get(status, PASSWORD)
    assert code == 401 and "X-Drums-Port" not in fields, "the daemon refuses without its token"
