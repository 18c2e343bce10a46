"""The steps `googledrive` and `login` in tasks of real desktops, and that nothing a host keeps has a secret of theirs.

The image `minimal` has no browser; the form is filled in `test_applications_accounts.py`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from accounts import GOOGLE, MARK, PASSWORD, SETTINGS, parameters, write_account
from desktops import Played, make_task, outcome, play, run
from drive_server import SECRETS, DriveServer, drive_server
from requires import requires

from drums.errors import SetupFailed
from drums_core import load_config
from drums_core.host import Host
from drums_core.model import SetupStep
from drums_core.setup import DesktopStepContext
from drums_osworld.steps import browser
from drums_osworld.steps.login import Login

pytestmark = requires("root", "criu")

SAVED = f"accounts-{uuid.uuid4().hex[:8]}"
LOGIN = {"settings_file": GOOGLE, "platform": "googledrive"}
CONTROL = "a remark that is kept, Wd5"


def written_since(began: float, *words: str) -> dict[str, list[str]]:
    """The files of the host's state folder, written since then, that have each word; images apart."""
    found: dict[str, list[str]] = {word: [] for word in words}
    for path in load_config().state_dir.rglob("*"):
        if "images" in path.parts or path.is_symlink() or not path.is_file() or path.stat().st_mtime < began:
            continue
        content = path.read_bytes()
        for word in words:
            if word.encode() in content:
                found[word].append(str(path))
    return found


async def filled(host: Host) -> Any:
    """The account is filled as the desktop is made; then that is saved and scored."""
    note = SetupStep("execute", {"command": f"echo {CONTROL} >&2; exit 3", "shell": True})
    operations: list[tuple[str, dict[str, Any]]] = [
        ("delete", {"query": "title = 'old'"}),
        ("upload", {"url": f"{MARK}a.pdf", "path": ["new", "a.pdf"]}),
    ]
    began = time.time()
    async with await host.create(make_task(SetupStep("googledrive", parameters(*operations)), note)) as slot:
        await slot.wait_valid()
        await slot.save(SAVED)
        try:
            reward = await slot.verify()
            kept = await trio.to_thread.run_sync(written_since, began, *SECRETS, CONTROL)
        finally:
            await host.delete_checkpoint(SAVED)
        return reward.score, outcome(slot).verdict, kept


class Untouched(DesktopStepContext):
    """A context in which what this test does is no agent's."""

    @property
    def has_acted(self) -> bool:
        """Never."""
        return False


async def no_browser(host: Host) -> Any:
    """What lies in the desktop's memory meanwhile, what does after, and the error."""
    step, began = Login(), time.time()
    seen: list[str] = []
    # The image has not what scripts speak to a browser with.
    module = "d=$(/usr/bin/python3 -m site --user-site); mkdir -p $d; touch $d/websocket.py"
    async with await host.create(make_task(SetupStep("execute", {"command": module, "shell": True}))) as slot:
        await slot.wait_valid()

        async def look() -> None:
            wait = "for i in $(seq 100); do stat -c '%U %n' /dev/shm/.drums-* 2>/dev/null && exit 0; sleep 0.05; done"
            seen.append(await run(slot, wait))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            with pytest.raises(SetupFailed) as info:
                await step.run(Untouched(slot), step.parse(LOGIN))
        with pytest.raises(SetupFailed, match="an agent has acted"):
            await step.run(DesktopStepContext(slot), step.parse(LOGIN))
        left = await run(slot, "ls -A /dev/shm; grep -rl Xv8 /tmp /home /var/tmp 2>/dev/null; true")
        return info.value, seen, left, await trio.to_thread.run_sync(written_since, began, "Xv8")


async def without(host: Host) -> Any:
    errors = []
    for kind, given in (("googledrive", parameters(("delete", {}))), ("login", LOGIN)):
        with pytest.raises(SetupFailed) as info:
            await host.create(make_task(SetupStep(kind, given)))
        errors.append(info.value)
    return errors


@pytest.fixture(scope="module")
def server() -> Iterator[DriveServer]:
    with drive_server() as found:
        found.add("old")
        yield found


@pytest.fixture(scope="module")
def logged() -> Iterator[list[str]]:
    """All that is logged meanwhile."""
    lines: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, root = Keeps(logging.DEBUG), logging.getLogger()
    loggers = [root, *(logging.getLogger(x) for x in ("httpx2", "httpcore2"))]
    levels = [x.level for x in loggers]
    root.addHandler(handler)
    for logger, level in zip(loggers, (logging.INFO, logging.DEBUG, logging.DEBUG), strict=True):
        logger.setLevel(level)
    yield lines
    root.removeHandler(handler)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="module")
def played(server: DriveServer, logged: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder: Path = tmp_path_factory.mktemp("operator")
    write_account(folder / "accounts", f"{server.url}/token")
    (folder / "a.pdf").write_bytes(b"content")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(browser, "LIMIT_S", 3.0)
        config: dict[str, Any] = {"accounts": folder / "accounts", "google_api": server.url, "file_mirror": folder}
        found = play({"filled": filled, "no browser": no_browser}, at_once=1, **config)
        found.results |= play({"without": without}, at_once=1, accounts=None).results
        yield found


def test_the_account_is_filled(played: Played, server: DriveServer) -> None:
    score, verdict, _ = played["filled"]
    assert server.tree() == {"new/", "new/a.pdf"} and (score, verdict) == (0.0, "valid")


def test_what_a_host_keeps_has_no_secret(played: Played, logged: list[str]) -> None:
    """Records, the saved checkpoint with the desktop's memory, logs. What is kept is found: the search can fail."""
    *_, kept = played["filled"]
    assert [kept[x] for x in SECRETS] == [[], [], []] and kept[CONTROL]
    text = "\n".join(logged)
    assert "POST" in text and [x for x in (*SECRETS, PASSWORD) if x in text] == []


def test_without_an_account_a_task_is_refused_with_the_setting(played: Played) -> None:
    """And the remedy gets through to who asked for the desktop."""
    for error, kind, name in zip(played["without"], ("googledrive", "login"), (SETTINGS, GOOGLE), strict=True):
        assert error.message.startswith(f"set-up step 0 ({kind}) failed: the account of {name!r} (setting 'accounts')")
        assert (error.setting, error.file, error.index) == ("accounts", name, 0) and "DRUMS_ACCOUNTS" in error.hint


def test_the_password_is_in_the_desktops_memory_until_the_step_ends(played: Played) -> None:
    """As the user's; then in no file of the desktop's, nor of the host's."""
    error, seen, left, kept = played["no browser"]
    assert "the browser does not answer on port 9222" in error.message
    assert seen[0].startswith("user /dev/shm/.drums-")
    assert left == "" and kept == {"Xv8": []}


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
