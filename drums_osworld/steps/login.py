"""The `login` step: let the desktop's browser sign in to Google Drive with the operator's account.

It opens the page and types e-mail and password into the form, by the browser's debugging port, as OSWorld does. A
browser that does not answer fails the set-up; a form that does not come is noted, as the browser may be signed in
already.

The password gets into the desktop: the browser is given it there, and keeps what the service answers. On its way it
lies in a file in the desktop's memory, which is removed before the step ends, and in no command line.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping

import attrs
import trio

from drums.errors import ConfigError, GuestError, SetupFailed
from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.account import check_settings_file, read_account_file, read_mapping, text_of, without
from drums_osworld.steps.browser import LOAD_LIMIT_S, run_in_browser
from drums_osworld.steps.parameters import structure

PLATFORM = "googledrive"
FORM_LIMIT_S = 10.0  # for each part of the form; OSWorld's 3 and 5 are short where desktops share a host
_REMOVE_LIMIT_S = 10.0
_MOST_NOTES = 3
_SHOWN = 500

# Its own arguments: the page, the file with e-mail and password, seconds for each part of the form. Prints notes.
_SCRIPT = r"""
page, account, form_s = sys.argv[4:]
with open(account) as file:
    email, password = json.load(file)

# The first visible one, whatever others are there: the form has a hidden field for the password, too.
FIRST = '''const one = [...document.querySelectorAll(SELECTOR)].find(one => {
    const box = one.getBoundingClientRect();
    return box.width && box.height && getComputedStyle(one).visibility !== "hidden";
});'''
PLACE = '''if (!one) return null;
    one.scrollIntoView({block: "nearest"});
    const box = one.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];'''
FOCUS = "one.focus(); one.select(); return document.activeElement === one;"
LENGTH = "return one.value.length;"


class Missing(Exception):
    pass


def look(function, selector):
    code = FIRST.replace("SELECTOR", json.dumps(selector)) + function
    reply = tab.call("Runtime.evaluate", expression=f"(() => {{{code}}})()", returnByValue=True)
    return reply.get("result", {}).get("value")


def shown(selector):
    # Twice at the same place: what still moves is not where a click would go.
    until, before = time.monotonic() + float(form_s), None
    while time.monotonic() < until:
        place = look(PLACE, selector)
        if place and place == before:
            return place
        before = place
        time.sleep(0.1)
    raise Missing(f"{selector!r} was not shown within {form_s} s")


def fill(selector, text):
    shown(selector)
    if not look(FOCUS, selector):
        raise Missing(f"{selector!r} did not take the focus")
    tab.call("Input.insertText", text=text)
    if look(LENGTH, selector) != len(text.encode("utf-16-le")) // 2:
        raise Missing(f"{selector!r} did not take the text")


def click(selector):
    x, y = shown(selector)
    for kind in ("mousePressed", "mouseReleased"):
        tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


try:
    tab = Tab(ask("/new?about:blank", "PUT"))
    tab.call("Page.bringToFront")
    try:
        tab.load(page)
    except websocket.WebSocketTimeoutException:
        print(f"{page!r} did not load within {load_s} s")
    try:
        fill('input[type="email"]', email)
        click("#identifierNext > div > button")
        fill('input[type="password"]', password)
        before = tab.loads
        click("#passwordNext > div > button")
        try:
            tab.wait_for_load(before, time.monotonic() + float(form_s))
        except websocket.WebSocketTimeoutException:
            raise Missing(f"no page came within {form_s} s of the password")
    except Missing as problem:
        print(problem)
    tab.socket.close()
except (OSError, websocket.WebSocketException) as error:
    sys.exit(f"the browser broke off: {type(error).__name__}")
"""


@attrs.frozen
class LoginParameters:
    """The parameters of `login`."""

    settings_file: str
    platform: str


class Login:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> LoginParameters:
        """The parameters; raises `ConfigError`."""
        parsed = structure(parameters, LoginParameters, "login")
        check_settings_file(parsed.settings_file, "login")
        if parsed.platform != PLATFORM:
            fault = f"platform is {parsed.platform!r}; known is {PLATFORM!r}"
            raise ConfigError(f"the parameters of a 'login' step are wrong: {fault}", path="$.parameters.platform")
        return parsed

    async def run(self, context: StepContext, parameters: object) -> None:
        """Sign in; raises `SetupFailed` and `GuestError`."""
        assert isinstance(parameters, LoginParameters)
        name = parameters.settings_file
        if context.has_acted:
            raise SetupFailed(
                "login: an agent has acted in this desktop, and what it left could read the password",
                hint="sign in before the agent acts, and save a checkpoint then",
                output="",
                file=name,
            )
        content = await trio.to_thread.run_sync(read_account_file, context.accounts, name)
        document = read_mapping(content, name)
        account = [text_of(document, key, name) for key in ("email", "password")]
        file = f"/dev/shm/.drums-{secrets.token_hex(8)}"
        arguments = (context.accounts.google_drive_page, file, str(FORM_LIMIT_S))
        try:
            await context.upload(file, json.dumps(account).encode())
            result = await run_in_browser(context, _SCRIPT, *arguments, limit_s=LOAD_LIMIT_S + 5 * FORM_LIMIT_S)
        finally:
            # A desktop that does not answer is refused for that already.
            with trio.move_on_after(_REMOVE_LIMIT_S, shield=True), contextlib.suppress(GuestError):
                await context.execute(["/bin/rm", "-f", "--", file])
        if result.returncode != 0:
            said = without(result.error, account).strip()
            raise SetupFailed(
                said[-_SHOWN:] or f"login: ended with code {result.returncode}", output=said[-2000:], file=name
            )
        for line in without(result.output, account).splitlines()[:_MOST_NOTES]:
            context.note(f"login: {line[:_SHOWN]}")


def _factory() -> Step:
    return Login()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `login` step."""
    register("login", _factory)
