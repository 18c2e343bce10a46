"""The steps `googledrive` and `login`: their account's files, Drive's API at a stand-in, and where secrets go."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from drive_server import CLIENT_SECRET, FOLDER, REFRESH_TOKEN, SECRETS, TOKEN, DriveServer, Fault, drive_server, refusal

from drums.errors import ConfigError, GuestError, SetupFailed
from drums_core.abc import Accounts, CommandResult
from drums_core.model import SetupStep, Task
from drums_core.testing import FakeStepContext, check_step, require
from drums_osworld.files import urls_of
from drums_osworld.steps import account, drive, googledrive, login
from drums_osworld.steps.drive import read_credentials
from drums_osworld.steps.googledrive import GoogleDrive
from drums_osworld.steps.login import Login

SETTINGS = "evaluation_examples/settings/googledrive/settings.yml"
TOKENS = "evaluation_examples/settings/googledrive/credentials.json"
GOOGLE = "evaluation_examples/settings/google/settings.json"
EMAIL, PASSWORD = "someone@mail.example", 'pass"word\\Xv8'
MARK = "https://huggingface.co/datasets/xlangai/ubuntu_osworld_file_cache/resolve/main/"


def write_account(folder: Path, token_uri: str, **tokens: Any) -> None:
    """The operator's folder, as PyDrive's sign-in leaves it."""
    yaml = (
        f"client_config_backend: file\nsave_credentials: True\nsave_credentials_backend: file\n"
        f"save_credentials_file: {TOKENS}\nget_refresh_token: True\n"
    )
    saved = {
        "_class": "OAuth2Credentials",
        "access_token": "old",
        "client_id": "client",
        "client_secret": CLIENT_SECRET,
        "refresh_token": REFRESH_TOKEN,
        "token_uri": token_uri,
        **tokens,
    }
    contents = {SETTINGS: yaml, TOKENS: json.dumps(saved), GOOGLE: json.dumps({"email": EMAIL, "password": PASSWORD})}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


@pytest.fixture
def server() -> Iterator[DriveServer]:
    with drive_server() as found:
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "PAUSE_S", 0.01)


@pytest.fixture
def context(server: DriveServer, tmp_path: Path) -> FakeStepContext:
    """One with an account at the stand-in, and one file."""
    write_account(tmp_path / "accounts", f"{server.url}/token")
    return FakeStepContext(
        accounts=Accounts(tmp_path / "accounts", server.url, f"{server.url}/page"),
        files={f"{MARK}a.pdf": bytes(range(256)) * 3000},
    )


def parameters(*operations: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    names, args = [x for x, _ in operations], [x for _, x in operations]
    return {"settings_file": SETTINGS, "operation": names, "args": args}


async def run(context: FakeStepContext, *operations: tuple[str, dict[str, Any]]) -> None:
    step = GoogleDrive()
    await step.run(context, step.parse(parameters(*operations)))


async def refused(context: FakeStepContext, *operations: tuple[str, dict[str, Any]]) -> SetupFailed:
    with pytest.raises(SetupFailed) as info:
        await run(context, *(operations or [("delete", {"query": "title = 'x'"})]))
    assert info.value.setting == "accounts"
    return info.value


# --- what the operations do


async def test_delete_takes_what_the_query_finds(context: FakeStepContext, server: DriveServer) -> None:
    """Of more than one page, files before folders, whatever else is there."""
    inside = server.folder("emails", server.folder("kept"))
    for title in ("a.txt", "b.txt", "c.txt", "d.txt", "e.txt"):
        server.add(title)
    server.add("in it", parents=(server.folder("emails"),))
    either = " or ".join(f"title = '{x}'" for x in ("a.txt", "b.txt", "c.txt", "d.txt", "emails"))
    await run(context, ("delete", {"query": f"({either}) and 'root' in parents", "trash": False}))
    assert server.tree() == {"kept/", "kept/emails/", "e.txt"} and inside in server.files
    deleted = [x for x in server.asked if x.startswith("DELETE")]
    assert len(deleted) == 5 and deleted[-1].endswith("/id8")  # the folder, with what is in it


async def test_a_query_with_or(context: FakeStepContext, server: DriveServer) -> None:
    """As OSWorld's tasks have them, without parentheses: what they find is deleted once, the folder last."""
    folder, file = server.folder("forms"), server.add("form.pdf")
    await run(context, ("delete", {"query": "title = 'forms' or title = 'form.pdf'"}))
    top = "DELETE /drive/v2/files"
    assert [x for x in server.asked if x.startswith("DELETE")] == [f"{top}/{file}", f"{top}/{folder}"]


@pytest.mark.parametrize("trash", [True, False])
async def test_trash_or_gone(context: FakeStepContext, server: DriveServer, trash: bool) -> None:
    file, folder = server.add("x"), server.folder("x")
    await run(context, ("delete", {"query": "title = 'x'", "trash": trash}))
    assert server.tree() == set()
    left = [server.files[x].trashed for x in (file, folder) if x in server.files]
    assert left == ([True, True] if trash else [])


async def test_deleting_is_for_good_unless_told(context: FakeStepContext, server: DriveServer) -> None:
    """And an empty query is everything, as in OSWorld."""
    server.add("x", parents=(server.folder("y"),))
    await run(context, ("delete", {}))
    assert server.files == {}


async def test_a_folder_inside_another_that_is_deleted(context: FakeStepContext, server: DriveServer) -> None:
    """It is gone with it, and so found no more: as it should be."""
    server.folder("x", server.folder("x"))
    await run(context, ("delete", {"query": "title = 'x'"}))
    assert server.files == {} and len([x for x in server.asked if x.startswith("DELETE")]) == 2


async def test_folders_are_made_once(context: FakeStepContext, server: DriveServer) -> None:
    """Those that are there are used; one in the trash, elsewhere, or a file of that name, is not."""
    meetings = server.folder("meetings")
    server.folder("minutes", meetings, trashed=True)
    server.add("minutes", parents=(meetings,))
    server.folder("minutes")
    for _ in range(2):
        await run(context, ("mkdirs", {"path": ["meetings", "minutes", "it's \\ June"]}))
    made = "meetings/minutes/"
    assert server.tree() == {"meetings/", "meetings/minutes", "minutes/", made, made + "it's \\ June/"}
    assert len(server.files) == 6


async def test_a_file_is_uploaded_from_the_mirror(context: FakeStepContext, server: DriveServer) -> None:
    """Into its folder; and what comes behind it is carried out."""
    upload = ("upload", {"url": f"{MARK}a.pdf", "path": ["invoices", "May", "invoice.pdf"]})
    await run(context, upload, ("upload", {"url": f"{MARK}a.pdf", "path": ["top.pdf"]}), ("mkdirs", {"path": ["z"]}))
    assert server.tree() == {"invoices/", "invoices/May/", "invoices/May/invoice.pdf", "top.pdf", "z/"}
    content = bytes(range(256)) * 3000
    assert [x.content == content for x in server.files.values() if x.mimeType != FOLDER] == [True, True]


async def test_a_file_that_cannot_be_had(context: FakeStepContext, server: DriveServer) -> None:
    """The account is not touched."""
    server.add("x")
    with pytest.raises(SetupFailed, match="cannot be had"):
        await run(context, ("delete", {}), ("upload", {"url": f"{MARK}none.pdf", "path": ["x"]}))
    assert server.asked == [] and server.tree() == {"x"}


def test_its_files_are_fetched_with_the_tasks() -> None:
    """By `drums tasks fetch`, before a set-up asks for them."""
    operations: list[tuple[str, dict[str, Any]]] = [
        ("delete", {"query": ""}),
        ("upload", {"url": f"{MARK}a.pdf", "path": ["x"]}),
    ]
    step = SetupStep("googledrive", parameters(*operations))
    assert urls_of([Task("t", "Do.", [step], {}, "test", "0" * 64)]) == [f"{MARK}a.pdf"]


# --- an account that cannot be used

REFUSALS = [
    (Fault("POST /token", 400, {"error": "invalid_grant", "error_description": "Token revoked."}), "invalid_grant", 0),
    (Fault("POST /token", 401, {"error": "invalid_client"}), "answered POST with 401 (invalid_client)", 0),
    (Fault("GET /drive", 401, refusal("authError")), "answered GET with 401 (authError: No.)", 0),
    (Fault("GET /drive", 403, refusal("insufficientPermissions")), "403 (insufficientPermissions: No.)", 0),
    (Fault("DELETE /drive", 403, refusal("insufficientFilePermissions")), "answered DELETE with 403", 0),
    (Fault("PUT /upload", 403, refusal("storageQuotaExceeded", "Full.")), "storageQuotaExceeded: Full.", 1),
    (Fault("GET /drive", 500, None), "answered GET with 500", 0),
    (Fault("GET /drive", 302, None), "answered GET with 302", 0),
    (Fault("GET /drive", 429, None), "answered GET with 429", 0),
    (Fault("GET /drive", 200, []), "and no JSON object", 0),
    (Fault("GET /drive", 200, {"items": [{}]}), "no list of files", 0),
    (Fault("POST /token", 200, {"access_token": ""}), "no 'access_token'", 0),
    (Fault("PUT /upload", 200, {"id": "x", "fileSize": "7"}), "has 7 bytes there, 768000 were uploaded", 1),
]


@pytest.mark.parametrize(("fault", "observed", "done"), REFUSALS, ids=lambda x: getattr(x, "at", None))
async def test_what_the_account_answers_is_told(
    context: FakeStepContext, server: DriveServer, fault: Fault, observed: str, done: int
) -> None:
    """With how far it came, and a remedy where it is the account's."""
    server.add("x")
    server.faults.append(fault)
    error = await refused(context, ("delete", {}), ("upload", {"url": f"{MARK}a.pdf", "path": ["x"]}))
    assert observed in error.message
    assert error.operations_done == done and error.file == SETTINGS
    assert bool(error.hint) is (fault.status in (400, 401, 403))


async def test_what_came_too_soon_is_asked_again(context: FakeStepContext, server: DriveServer) -> None:
    server.add("x")
    server.faults += [Fault("GET", 403, refusal("userRateLimitExceeded"), times=2), Fault("DELETE", 429, times=1)]
    await run(context, ("delete", {}))
    assert server.files == {}
    server.faults.append(Fault("GET", 403, refusal("rateLimitExceeded")))
    error = await refused(context)
    assert "rateLimitExceeded" in error.message and server.faults[-1].times == (1 << 30) - drive.TRIES


@pytest.mark.parametrize("at", ["POST /token", "GET /drive", "PUT /upload"])
async def test_a_silent_server(
    context: FakeStepContext, server: DriveServer, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "TIMEOUT_S", 0.2)
    server.faults.append(Fault(at))
    with trio.fail_after(5):
        error = await refused(context, ("delete", {}), ("upload", {"url": f"{MARK}a.pdf", "path": ["x"]}))
    assert "did not answer within 0.2 s" in error.message and "google_api" in error.hint


async def test_a_server_that_drips(
    context: FakeStepContext, server: DriveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then keeps no step alive."""
    monkeypatch.setattr(googledrive, "LIMIT_S", 0.5)
    server.faults.append(Fault("GET", drip=True))
    with trio.fail_after(5):
        assert "longer than 0.5 s" in (await refused(context)).message


@pytest.mark.parametrize("at", ["POST /token", "GET /drive", "DELETE /drive", "POST /upload", "PUT /upload"])
@pytest.mark.parametrize("status", [200, 403, 429])
async def test_a_reply_without_an_end(
    context: FakeStepContext, server: DriveServer, at: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read no further than is allowed, whatever it is about, and asked for once."""
    monkeypatch.setattr(drive, "LARGEST_BYTES", 1 << 16)
    server.add("x")
    server.faults.append(Fault(at, status, size=64 << 20))
    error = await refused(context, ("delete", {}), ("upload", {"url": f"{MARK}a.pdf", "path": ["x"]}))
    said = rf"answered {at.split()[0]} with {status} and at least (\d+) bytes, allowed are 65536"
    found = re.search(said, error.message)
    assert found and 1 << 16 < int(found[1]) < 2 << 20
    assert server.sent < 16 << 20  # what the sockets hold, and no more
    assert len([x for x in server.asked if x.startswith(at)]) == 1


async def test_a_reply_that_would_unpack_to_more(context: FakeStepContext, server: DriveServer) -> None:
    """Nothing is unpacked: a few bytes could be any number of them."""
    server.faults.append(Fault("GET", size=64 << 20, packed=True))
    assert "answered GET with 200, packed as 'gzip', although not asked for so" in (await refused(context)).message


@pytest.mark.parametrize("more", [0, 1])
async def test_a_reply_as_long_as_is_allowed(
    context: FakeStepContext, server: DriveServer, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {"items": [], "kind": "x" * 5000}
    monkeypatch.setattr(drive, "LARGEST_BYTES", len(json.dumps(document)) - more)
    server.faults.append(Fault("GET", 200, document))
    if more:
        assert "at least 5025 bytes, allowed are 5024" in (await refused(context)).message
    else:
        await run(context, ("delete", {}))


async def test_a_step_that_is_cancelled_ends_at_once(context: FakeStepContext, server: DriveServer) -> None:
    """In the middle of a request; nothing of it goes on."""
    server.add("x")
    server.faults.append(Fault("GET", times=1))
    with trio.fail_after(5), trio.move_on_after(0.3) as scope:
        await run(context, ("delete", {}))
    assert scope.cancelled_caught and server.asked == ["POST /token", "GET /drive/v2/files"]
    await trio.sleep(0.2)
    assert len(server.asked) == 2 and server.tree() == {"x"}


async def test_a_server_that_is_not_there(context: FakeStepContext) -> None:
    context.accounts = attrs.evolve(context.accounts, google_api="http://127.0.0.1:1")
    assert "http://127.0.0.1:1 cannot be reached" in (await refused(context)).message


async def test_an_upload_is_sent_nowhere_else(context: FakeStepContext, server: DriveServer) -> None:
    server.upload_to = "http://localhost:1"
    error = await refused(context, ("upload", {"url": f"{MARK}a.pdf", "path": ["x"]}))
    assert "no place of its own" in error.message


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


WRONG = [
    (parameters(("copy", {})), "$.parameters.operation[0]"),
    ({**parameters(), "operation": ["delete"]}, "$.parameters.args"),
    (parameters(("delete", {"query": 7})), "$.parameters.args[0]"),
    (parameters(("delete", {}), ("mkdirs", {})), "$.parameters.args[1]"),
    (parameters(("delete", {"trash": "no"})), "$.parameters.args[0]"),
    (parameters(("mkdirs", {"path": []})), "$.parameters.args[0].path"),
    (parameters(("mkdirs", {"path": "x"})), "$.parameters.args[0]"),
    (parameters(("upload", {"url": "x", "path": ["a", ""]})), "$.parameters.args[0].path"),
]


@pytest.mark.parametrize(("given", "path"), WRONG)
def test_wrong_parameters(given: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as info:
        GoogleDrive().parse(given)
    assert info.value.path == path and path in info.value.faults[0]


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
