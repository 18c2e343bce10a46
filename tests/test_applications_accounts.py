"""The step `login` in the browser of the image `osworld`, at a page of the desktop's own: `./run test --all`."""

from __future__ import annotations

import base64
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from accounts import EMAIL, GOOGLE, PASSWORD, write_account
from desktops import Played, make_task, play, run
from requires import requires

from drums.errors import SetupFailed
from drums_core.abc import Accounts
from drums_core.host import Host
from drums_core.model import SetupStep
from drums_core.setup import DesktopStepContext
from drums_osworld.steps import browser, login
from drums_osworld.steps.login import Login

pytestmark = [requires("root", "criu", "osworld"), pytest.mark.applications]

SITE = "http://127.0.0.1:8123"
LOG = "/tmp/sign_in.log"
LOGIN = {"settings_file": GOOGLE, "platform": "googledrive"}
UNPACK = "import base64, sys; open(sys.argv[1], 'wb').write(base64.b64decode(sys.argv[2]))"
TABS = 'curl -s 127.0.0.1:9222/json | grep -o \'"title": "[^"]*"\''


@attrs.define
class AtPage(DesktopStepContext):
    """A context of a host that names another page."""

    page: str = "/drive"

    @property
    def has_acted(self) -> bool:
        """What this test does is no agent's."""
        return False

    @property
    def accounts(self) -> Accounts:
        """With that page."""
        return attrs.evolve(super().accounts, google_drive_page=self.page)


async def signing_in(host: Host) -> Any:
    """As a task's step; then at pages that ask nothing, lead nowhere, are not there; and without a browser."""
    text = base64.b64encode(Path(__file__).with_name("sign_in_page.py").read_bytes()).decode()
    task = make_task(
        SetupStep("execute", {"command": ["python3", "-c", UNPACK, "/tmp/sign_in_page.py", text]}),
        SetupStep("launch", {"command": ["python3", "/tmp/sign_in_page.py", "8123", LOG]}),
        SetupStep("launch", {"command": ["google-chrome", "--remote-debugging-port=1337"]}),
        SetupStep("launch", {"command": ["socat", "tcp-listen:9222,fork", "tcp:localhost:1337"]}),
        SetupStep("login", LOGIN),
    )
    found: dict[str, Any] = {}
    step = Login()
    async with await host.create(task, image="osworld") as slot:
        found["notes"] = list(slot.episode.notes)
        found["sent"] = await run(slot, f"cat {LOG}")
        found["tabs"] = await run(slot, TABS)
        found["memory"] = await run(slot, "ls -A /dev/shm | grep drums; true")
        for name, page in (("in", f"{SITE}/in"), ("stays", f"{SITE}/stays"), ("absent", "http://127.0.0.1:8124/")):
            slot.episode.notes.clear()
            await step.run(AtPage(slot, page=page), step.parse(LOGIN))
            found[name] = list(slot.episode.notes)
        found["sent in the end"] = await run(slot, f"cat {LOG}")
        await run(slot, "killall -q chrome; sleep 3; true")
        with pytest.raises(SetupFailed) as info:
            await step.run(AtPage(slot, page=f"{SITE}/drive"), step.parse(LOGIN))
        found["no browser"] = info.value
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("accounts")
    write_account(folder, "https://tokens.example")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(browser, "LIMIT_S", 30.0)
        patch.setattr(login, "FORM_LIMIT_S", 5.0)
        played: Played = play({"signing in": signing_in}, accounts=folder, google_drive_page=f"{SITE}/drive")
    assert played.left == []
    yield played["signing in"]


def test_the_browser_signs_in(found: Any) -> None:
    """The form is sent once, as it was filled; the browser shows what comes then, and nothing is noted."""
    (sent,) = found["sent"].splitlines()
    form = dict(urllib.parse.parse_qsl(sent, keep_blank_values=True))
    assert form == {"email": EMAIL, "hidden": "", "password": PASSWORD}
    assert "My Drive" in found["tabs"] and "Sign in" not in found["tabs"]
    assert found["notes"] == [] and found["memory"] == ""


def test_what_did_not_come_is_noted(found: Any) -> None:
    """A form that is not asked for, a password that leads nowhere, a page that does not load. Nothing is sent again."""
    email = """login: 'input[type="email"]' was not shown within 5.0 s"""
    assert found["in"] == [email]
    assert found["stays"] == ["login: no page came within 5.0 s of the password"]
    assert found["absent"] == ["login: 'http://127.0.0.1:8124/' did not load: net::ERR_CONNECTION_REFUSED", email]
    assert found["sent in the end"] == found["sent"]


def test_a_browser_that_is_not_there_fails_the_set_up(found: Any) -> None:
    assert "the browser does not answer on port 9222" in found["no browser"].message
    assert PASSWORD not in str(found["no browser"])
