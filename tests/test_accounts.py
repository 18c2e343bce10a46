"""The steps `googledrive` and `login`: their account's files, where secrets go, and signing in."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from accounts import (
    EMAIL,
    GOOGLE,
    MARK,
    PASSWORD,
    SETTINGS,
    TOKENS,
    context_at,
    parameters,
    refused,
    run,
    write_account,
)
from drive_server import CLIENT_SECRET, REFRESH_TOKEN, SECRETS, TOKEN, DriveServer, Fault, drive_server, refusal

from drums.errors import ConfigError, GuestError, SetupFailed
from drums_core.abc import CommandResult
from drums_core.testing import FakeStepContext, check_step, require
from drums_osworld.steps import account, drive, login
from drums_osworld.steps.drive import read_credentials
from drums_osworld.steps.googledrive import GoogleDrive
from drums_osworld.steps.login import Login


@pytest.fixture
def server() -> Iterator[DriveServer]:
    with drive_server() as found:
        yield found


@pytest.fixture
def context(server: DriveServer, tmp_path: Path) -> FakeStepContext:
    """One with an account at the stand-in, and one file."""
    return context_at(server, tmp_path / "accounts")


# --- the operator's folder


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.yml", "a/../../x.yml", "a/..", "", " ", "a\0b"])
@pytest.mark.parametrize("step", [GoogleDrive(), Login()], ids=["googledrive", "login"])
def test_a_path_that_leaves_the_folder(step: Any, name: str) -> None:
    """Refused as the task is read."""
    given = {**parameters(), "settings_file": name}
    if isinstance(step, Login):
        given = {"settings_file": name, "platform": "googledrive"}
    with pytest.raises(ConfigError) as info:
        step.parse(given)
    assert info.value.path == "$.parameters.settings_file"


async def test_without_the_setting(context: FakeStepContext, server: DriveServer) -> None:
    """It is named, with the file."""
    context.accounts = attrs.evolve(context.accounts, folder=None)
    error = await refused(context)
    assert SETTINGS in error.message and "'accounts'" in error.message and "DRUMS_ACCOUNTS" in error.hint
    with pytest.raises(SetupFailed, match="no folder with accounts"):
        await sign_in(context)
    assert server.asked == [] and context.calls == []


def link_out(folder: Path) -> None:
    os.rename(folder / SETTINGS, folder.parent / "settings.yml")
    (folder / SETTINGS).symlink_to(folder.parent / "settings.yml")


def folder_link_out(folder: Path) -> None:
    os.rename(folder / "evaluation_examples", folder.parent / "accounts-elsewhere")
    (folder / "evaluation_examples").symlink_to(folder.parent / "accounts-elsewhere")


def pipe(folder: Path) -> None:
    (folder / SETTINGS).unlink()
    os.mkfifo(folder / SETTINGS)


def replaced(name: str, content: str) -> Any:
    return lambda folder: (folder / name).write_text(content)


FILES = [
    (lambda folder: (folder / SETTINGS).unlink(), "No such file"),
    (lambda folder: (folder / TOKENS).unlink(), "No such file"),
    (lambda folder: os.rename(folder, folder.parent / "other"), "No such file"),
    (link_out, "is outside of"),
    (folder_link_out, "is outside of"),
    (pipe, "no regular file"),
    (replaced(SETTINGS, "x" * (account.LARGEST_BYTES + 1)), "more than the allowed"),
    (replaced(SETTINGS, f"a: [{REFRESH_TOKEN}"), "no YAML mapping"),
    (replaced(SETTINGS, REFRESH_TOKEN), "no YAML mapping"),
    (replaced(SETTINGS, "client_config_backend: service"), "service account"),
    (replaced(SETTINGS, "save_credentials: False"), "no 'save_credentials_file'"),
    (replaced(TOKENS, f'{{"refresh_token": "{REFRESH_TOKEN}",'), "no JSON object"),
    (replaced(TOKENS, json.dumps({"client_id": "a", "client_secret": CLIENT_SECRET})), "no 'refresh_token'"),
    (lambda folder: write_account(folder, "http://tokens.example/token"), "neither https:// nor the loopback"),
]


@pytest.mark.parametrize(("spoil", "cause"), FILES)
async def test_a_file_that_is_not_right(context: FakeStepContext, server: DriveServer, spoil: Any, cause: str) -> None:
    """Told by its cause; nothing is sent, and nothing of it is shown."""
    spoil(context.accounts.folder)
    error = await refused(context)
    assert cause in error.message and server.asked == []
    assert shown_in(error) == []


async def test_a_link_that_stays_inside(context: FakeStepContext, server: DriveServer) -> None:
    """As mounted secrets are."""
    folder = context.accounts.folder
    assert folder is not None
    os.rename(folder / SETTINGS, folder / "..data")
    (folder / SETTINGS).symlink_to("../../../..data")
    await run(context, ("mkdirs", {"path": ["x"]}))
    assert server.tree() == {"x/"}


async def test_without_the_library_for_settings(context: FakeStepContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that has it is named."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "drums[osworld]" in (await refused(context)).hint


# --- secrets


def shown_in(*things: Any, secrets: tuple[str, ...] = (*SECRETS, PASSWORD)) -> list[str]:
    """The secrets that are in an error with all its causes, or in a text."""
    texts = []
    for thing in things:
        while thing is not None:
            texts.append(f"{thing} {thing!r} {getattr(thing, 'facts', '')} {getattr(thing, 'hint', '')}")
            texts.append(json.dumps(getattr(thing, "facts", ""), default=str))
            thing = thing.__cause__ if isinstance(thing, BaseException) else None
    # As JSON has them, too.
    return [x for x in secrets if any(x in text or json.dumps(x)[1:-1] in text for text in texts)]


ECHO = Fault("GET", 403, refusal("x", f"{TOKEN} of {REFRESH_TOKEN} and {CLIENT_SECRET} may not"))


async def test_no_secret_in_errors_and_logs(
    context: FakeStepContext, server: DriveServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even where the server says them back."""
    caplog.set_level(logging.DEBUG)
    await run(context, ("delete", {}), ("upload", {"url": f"{MARK}a.pdf", "path": ["x"]}))
    server.faults.append(ECHO)
    error = await refused(context)
    assert "[secret] of [secret] and [secret] may not" in error.message
    assert caplog.records and shown_in(caplog.text, error, context.notes) == []
    assert shown_in(read_credentials(context.accounts, SETTINGS)) == []


async def test_a_secret_that_is_shown_is_seen(
    context: FakeStepContext, server: DriveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing takes them out, the check above finds each of them."""
    for module in (drive, login):
        monkeypatch.setattr(module, "without", lambda text, secrets: text)
    server.faults.append(ECHO)
    assert shown_in(await refused(context)) == list(SECRETS)
    context = BrowserContext(result=CommandResult(1, "", f"ended: {PASSWORD}"), accounts=context.accounts)
    with pytest.raises(SetupFailed) as info:
        await sign_in(context)
    assert shown_in(info.value) == [PASSWORD]


# --- login


@attrs.define
class BrowserContext(FakeStepContext):
    """One where the script about the browser comes to `result`."""

    result: CommandResult | Exception = attrs.field(kw_only=True)

    async def execute(self, command: Any, *, shell: bool = False, timeout_s: float = 120.0) -> CommandResult:
        """As told, for Python."""
        await super().execute(command, shell=shell, timeout_s=timeout_s)
        if command[0] != "/usr/bin/python3":
            return CommandResult(0, "", "")
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def sign_in(context: FakeStepContext, **given: Any) -> None:
    step = Login()
    await step.run(context, step.parse({"settings_file": GOOGLE, "platform": "googledrive", **given}))


def test_another_platform_is_refused() -> None:
    with pytest.raises(ConfigError, match="platform is 'mail'") as info:
        Login().parse({"settings_file": GOOGLE, "platform": "mail"})
    assert info.value.path == "$.parameters.platform"


async def test_the_browser_is_given_the_account_in_a_file(context: FakeStepContext) -> None:
    """And in no command line; it is removed."""
    await sign_in(context)
    (file,) = context.uploaded
    assert json.loads(context.uploaded[file]) == [EMAIL, PASSWORD] and file.startswith("/dev/shm/")
    commands = [what for method, what in context.calls if method == "execute"]
    assert [x[0] for x in commands] == ["/usr/bin/python3", "/bin/rm"]
    assert commands[0][-3:-1] == [context.accounts.google_drive_page, file] and commands[1][-1] == file
    assert shown_in(str(commands), context.notes, secrets=(PASSWORD, EMAIL)) == []


async def test_what_the_form_did_not_do_is_noted(context: FakeStepContext) -> None:
    said = f"""'input[type="email"]' was not shown within 10.0 s {PASSWORD}\n"""
    browser = BrowserContext(result=CommandResult(0, said, ""), accounts=context.accounts)
    await sign_in(browser)
    assert browser.notes == ["""login: 'input[type="email"]' was not shown within 10.0 s [secret]"""]


@pytest.mark.parametrize("result", [CommandResult(1, "", f"no browser: {PASSWORD}"), GuestError("no answer")])
async def test_a_browser_that_does_not_answer(context: FakeStepContext, result: CommandResult | Exception) -> None:
    """Fails the set-up without the password, and leaves no file."""
    browser = BrowserContext(result=result, accounts=context.accounts)
    with pytest.raises((SetupFailed, GuestError)) as info:
        await sign_in(browser)
    assert ("no browser: [secret]" if isinstance(result, CommandResult) else "no answer") in str(info.value)
    assert shown_in(info.value) == [] and browser.calls[-1] == ("execute", ["/bin/rm", "-f", "--", *browser.uploaded])


@pytest.mark.parametrize("content", ["", "[]", '{"email": "a"}', '{"email": "a", "password": ""}', f'"{PASSWORD}'])
async def test_an_account_without_a_password(context: FakeStepContext, content: str) -> None:
    replaced(GOOGLE, content)(context.accounts.folder)
    with pytest.raises(SetupFailed, match=r"no JSON object|no 'password'") as info:
        await sign_in(context)
    assert info.value.setting == "accounts" and context.calls == []
    assert shown_in(info.value, secrets=(PASSWORD.replace("\\", ""), PASSWORD)) == []


# --- the rules of every step


async def test_no_password_is_typed_where_an_agent_has_acted(context: FakeStepContext) -> None:
    """What it left could read it."""
    context.has_acted = True
    step = Login()
    with pytest.raises(SetupFailed, match="an agent has acted"):
        await step.run(context, step.parse({"settings_file": GOOGLE, "platform": "googledrive"}))
    assert not context.calls


async def test_the_suite_of_a_step(context: FakeStepContext) -> None:
    """With an account, where each can be carried out and cancelled at any point."""

    def fresh() -> FakeStepContext:
        return FakeStepContext(accounts=context.accounts, files=context.files)

    upload = ("upload", {"url": f"{MARK}a.pdf", "path": ["a", "b"]})
    good = [parameters(("delete", {"query": "title = 'b'"}), upload)]
    require(await check_step(GoogleDrive, good=good, bad=[{}], context=fresh, asks_nothing=True))
    good = [{"settings_file": GOOGLE, "platform": "googledrive"}]
    require(await check_step(Login, good=good, bad=[{}], context=fresh))
