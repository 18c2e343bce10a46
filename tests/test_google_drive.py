"""The step `googledrive`: what its operations do, and what it tells of an account that answers otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from accounts import MARK, SETTINGS, context_at, parameters, refused, run
from drive_server import FOLDER, DriveServer, Fault, drive_server, refusal

from drums.errors import ConfigError, SetupFailed
from drums_core.model import SetupStep, Task
from drums_core.testing import FakeStepContext
from drums_osworld.files import urls_of
from drums_osworld.steps import drive, googledrive
from drums_osworld.steps.googledrive import GoogleDrive


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
    return context_at(server, tmp_path / "accounts")


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


@pytest.mark.parametrize("at", ["127.0.0.1:1", ""])
async def test_a_password_in_the_setting_is_not_told(context: FakeStepContext, server: DriveServer, at: str) -> None:
    """Whether the service is out of reach, or refuses."""
    place = at or server.url.removeprefix("http://")
    context.accounts = attrs.evolve(context.accounts, google_api=f"http://me:pa@s5word@{place}")
    server.faults.append(Fault("GET", 500, None))
    error = await refused(context)
    assert f"http://{place} " in error.message and "s5word" not in error.message and "pa@" not in error.message


async def test_an_upload_is_sent_nowhere_else(context: FakeStepContext, server: DriveServer) -> None:
    server.upload_to = "http://localhost:1"
    error = await refused(context, ("upload", {"url": f"{MARK}a.pdf", "path": ["x"]}))
    assert "no place of its own" in error.message


# --- its parameters


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
