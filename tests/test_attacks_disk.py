"""An agent that fills its home: what a full file system of the host does to it, to its neighbour and to the journal.

On a state folder of its own, of a few hundred MiB; nothing limits what a desktop's files may take of it.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from desktops import Played, make_task, play, run
from requires import requires
from scratch import copy, scratch_state
from test_attacks import score

from drums.errors import DrumsError
from drums_core.host import Host
from drums_core.journal_file import FILE, JournalError
from drums_core.model import Reward
from drums_core.slot import Slot

pytestmark = requires("root", "criu")
SIZE_MIB = 700
LITTLE = 12 << 20  # enough for the journal


@pytest.fixture(scope="module")
def state_dir() -> Iterator[Path]:
    """An ext4 in a file, with the machine's image and CRIU; on a tmpfs files would count as the desktop's memory."""
    if not Path("/dev/loop-control").exists():
        pytest.skip("this host has no loop devices")
    with scratch_state() as config:
        folder, file = config.state_dir / "small", config.state_dir / "small.ext4"
        folder.mkdir()
        with file.open("wb") as f:
            f.truncate(SIZE_MIB << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(file)], check=True)
        subprocess.run(["mount", "-o", "loop", str(file), str(folder)], check=True)
        try:
            folder.chmod(0o711)
            for name in ("criu", "images", "checkpoints"):
                copy(config.state_dir / name, folder / name)
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)


async def scored(slot: Slot, **how: Any) -> Reward | str:
    """The reward, or why there is none."""
    try:
        return await score(slot, **how)
    except JournalError as e:
        return e.code


async def fill_the_home(host: Host) -> dict[str, Any]:
    """One agent takes all but a little, and then that; its neighbour has done its task."""
    state = host.config.state_dir
    async with await host.create(make_task()) as slot, await host.create(make_task()) as neighbour:
        await slot.wait_valid()
        await neighbour.wait_valid()
        await run(neighbour, "mkdir ~/done")
        found: dict[str, Any] = {}
        await run(slot, f"head -c {shutil.disk_usage(state).free - LITTLE} /dev/zero >~/much", timeout_s=120)
        found["no room for a copy"] = {"agent": await scored(slot), "neighbour": await scored(neighbour)}
        told = await slot.execute("cat /dev/zero >~/all", shell=True, timeout_s=120)
        assert "No space left" in told.error, told
        found["in place"] = await scored(neighbour, in_place=True)
        try:
            await (await host.create(make_task())).close()
        except (DrumsError, OSError) as e:
            found["create"] = str(e)
        await run(slot, "rm ~/much ~/all; mkdir ~/done")
        found["after"] = {"agent": await scored(slot), "neighbour": await scored(neighbour)}
    with closing(sqlite3.connect(f"file:{state / FILE}?mode=ro", uri=True)) as db:
        (found["checked"],) = db.execute("PRAGMA integrity_check").fetchone()
        found["rewards"] = [x for (x,) in db.execute("SELECT score FROM rewards ORDER BY number")]
    return found


@pytest.fixture(scope="module")
def played(state_dir: Path) -> Iterator[Played]:
    yield play({"fill-the-home": fill_the_home}, state_dir=state_dir)


def test_fill_the_home(played: Played) -> None:
    """No copy can be made: no score, by whose doing the evidence says. No reward that cannot be put on disk is given.

    Once there is room again all goes on, and the journal holds each reward that was.
    """
    found = played["fill-the-home"]
    for who, cause in (("agent", "agent"), ("neighbour", "infrastructure")):
        reward = found["no room for a copy"][who]
        assert (reward.score, reward.valid, reward.checker_error_cause) == (None, True, cause), (who, reward)
        assert "cannot be copied" in str(reward.checker_error) and "No space left" in str(reward.checker_error)
        (seen,) = [x for x in reward.provenance["checker_error_evidence"] if "left for a copy" in x]
        assert re.search(r"has written (\d+) MiB", seen), seen
    assert "No space left" in found["create"]
    for reward in found["after"].values():
        assert (reward.score, reward.valid) == (1.0, True), reward
    in_place = found["in place"]  # the journal's file may have room of its own left
    given = [] if in_place == "journal_error" else [in_place.score]
    assert given in ([], [1.0])
    assert found["checked"] == "ok" and found["rewards"] == [None, None, *given, 1.0, 1.0]
    assert not played.left
