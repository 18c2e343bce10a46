"""Set-up steps about windows and files, operators' verifiers and OSWorld's view of it, on real desktops."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from desktops import Played, judged, outcome, play, run
from requires import osworld_files, requires

from drums.errors import SetupFailed, VerifierNotFound
from drums_core import load_config, open_host
from drums_core.host import Host
from drums_core.model import SetupStep, Task

pytestmark = requires("root", "criu")

ROOT = Path(__file__).parents[1]
OSWORLD = Path(os.environ.get("DRUMS_OSWORLD") or ROOT.parent / "shared" / "osworld")
BASE = "https://huggingface.co/datasets/xlangai/ubuntu_osworld_file_cache/resolve/main"
EXAMPLE = ROOT / "plugins" / "drums-verifier-example"


def mirrored_file() -> str:
    """The path of a spreadsheet in the mirror."""
    return min(str(x.relative_to(OSWORLD / "file_cache")) for x in (OSWORLD / "file_cache").rglob("*.xlsx"))


def step(kind: str, **parameters: Any) -> SetupStep:
    return SetupStep(kind, parameters)


def make_task(*config: SetupStep, **evaluator: Any) -> Task:
    return Task("00000000-drums-steps", "Rename a to b.", config, evaluator, "test", "0" * 64)


RENAMED = {
    "func": "drums_verifier",
    "verifier": "example_files",
    "function": "renamed_folder",
    "options": {"old": "a", "new": "~/b"},
}


async def windows_and_files(host: Host) -> Any:
    """The steps of a task; what of them is there afterwards; and OSWorld's controller at the end."""
    name = mirrored_file()
    task = make_task(
        step("download", files=[{"url": f"{BASE}/{name}", "path": "/home/user/Documents/of the task.xlsx"}]),
        step("execute", command="echo text > ~/letter.txt", shell=True),
        step("open", path="/home/user/letter.txt"),
        step("open", path="/home/user/Documents"),
        step("activate_window", window_name="letter.txt"),
        step("activate_window", window_name="no such window", strict=True),
        step("launch", command=["xterm", "-T", "to be closed", "-e", "sleep", "1000"]),
        step("execute", command="until wmctrl -l | grep -q closed; do sleep 0.1; done", shell=True),
        step("close_window", window_name="to be closed", strict=True),
        func="check_include_exclude",
        result={"type": "accessibility_tree"},
        expected={"type": "rule", "rules": {"include": ["letter.txt - Mousepad", "desktop-frame"], "exclude": []}},
    )
    async with await host.create(task) as slot:
        content = await slot.read_file("Documents/of the task.xlsx")
        titles = await run(slot, "sleep 0.5; wmctrl -l | cut -d' ' -f5-")
        active = await run(slot, "xdotool getactivewindow getwindowname")
        owner = await run(slot, "stat -c %u:%a Documents/*.xlsx")
        tree = await slot.accessibility()
        notes = list(slot.episode.notes)
        valid = await judged(slot)
        reward = await slot.verify(strict=False)
        return {
            "same": content == (OSWORLD / "file_cache" / name).read_bytes(),
            "titles": titles.split("\n"),
            "active": active,
            "owner": owner,
            "tree": tree["AT"],
            "notes": notes,
            "outcome": valid,
            "reward": reward,
        }


async def not_in_the_mirror(host: Host) -> Any:
    task = make_task(step("download", files=[{"url": f"{BASE}/no/such", "path": "/home/user/x"}]), **RENAMED)
    return await refused(host, attrs.evolve(task, evaluator={"func": "infeasible"}))


async def no_such_file(host: Host) -> Any:
    return await refused(host, make_task(step("open", path="/home/user/none.txt"), func="infeasible"))


async def refused(host: Host, task: Task) -> SetupFailed:
    with pytest.raises(SetupFailed) as info:
        await host.create(task)
    return info.value


async def verifier(host: Host) -> Any:
    """Refused, installed while the host is open, and then run: undone, done, and misspelt."""
    task = make_task(step("execute", command="mkdir ~/a", shell=True), **RENAMED)
    with pytest.raises(VerifierNotFound) as info:
        await host.create(task)
    target = next(x for x in sys.path if x.endswith("/overlay/site-packages"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, str(EXAMPLE)]
    await trio.run_process(pip, capture_stdout=True, capture_stderr=True)
    with pytest.raises(VerifierNotFound) as misspelt:
        await host.create(attrs.evolve(task, evaluator={**RENAMED, "function": "rename_folder"}))
    async with await host.create(task) as slot:
        before = await slot.verify(strict=False)
        await run(slot, "mv ~/a ~/b")
        after = await slot.verify(strict=False)
        slot.task = attrs.evolve(
            task,
            evaluator={
                "func": "drums_verifier",
                "verifier": "example_files",
                "function": "file_lines",
                "options": {"path": "~/lines", "lines": ["x", "y"]},
            },
        )
        await run(slot, "echo x > ~/lines")
        half = await slot.verify(strict=False)
        return {
            "refused": info.value,
            "misspelt": misspelt.value,
            "rewards": (before, after, half),
            "outcome": outcome(slot),
        }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    files = osworld_files(OSWORLD)
    overlay = tmp_path_factory.mktemp("verifiers") / "overlay" / "site-packages"
    overlay.mkdir(parents=True)
    scenarios = {x.__name__: x for x in (windows_and_files, not_in_the_mirror, no_such_file, verifier)}
    sys.path.append(str(overlay))
    try:
        yield play(scenarios, file_mirror=files)
    finally:
        sys.path.remove(str(overlay))


def test_downloaded_file_is_the_users_and_the_same(played: Played) -> None:
    found = played["windows_and_files"]
    assert found["same"] and found["owner"] == "1000:644\n"


def test_windows_were_opened_activated_and_closed(played: Played) -> None:
    """And what was not there is noted, no more."""
    found = played["windows_and_files"]
    assert any("letter.txt" in title for title in found["titles"])
    assert "Documents" in found["titles"] and "to be closed" not in found["titles"]
    assert "letter.txt" in found["active"]
    assert found["notes"] == ["activate_window: there is no window with the title 'no such window' exactly"]
    assert found["outcome"].verdict == "valid"


def test_accessibility_tree_has_the_application(played: Played) -> None:
    found = played["windows_and_files"]["tree"]
    assert found.startswith("<desktop-frame ") and 'name="mousepad"' in found and "letter.txt" in found


def test_osworlds_controller_reads_the_tree_in_a_worker(played: Played) -> None:
    """Its `get_accessibility_tree`, through the gateway."""
    reward = played["windows_and_files"]["reward"]
    assert (reward.score, reward.valid, reward.checker_error) == (1.0, True, None)


def test_set_up_fails_by_its_cause(played: Played) -> None:
    fault = played["not_in_the_mirror"]
    assert f"{BASE}/no/such" in fault.message and "is not in the mirror" in fault.message
    assert fault.hint == "put it into file_mirror"
    assert (fault.index, fault.step_type) == (0, "download")
    fault = played["no_such_file"]
    assert "Application/file not found: /home/user/none.txt" in fault.message and fault.step_type == "open"


def test_a_verifier_that_was_installed_meanwhile_scores(played: Played) -> None:
    found = played["verifier"]
    assert "no installed package has the verifier 'example_files'" in found["refused"].message
    assert "renamed_folder" in found["misspelt"].candidates
    before, after, half = found["rewards"]
    assert [x.checker_error for x in (before, after, half)] == [None, None, None]
    assert (before.score, after.score, half.score) == (0.0, 1.0, 0.5)
    assert before.valid and after.valid and half.valid
    provenance = after.provenance
    assert provenance["findings"]["evidence"] == {"old_exists": False, "new_is_folder": True}
    checker = provenance["checker"]
    assert (checker["name"], checker["distribution"], checker["version"]) == (
        "drums_verifier",
        "drums-verifier-example",
        "0.1.0",
    )


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []


async def test_no_desktop_starts_where_what_is_compared_cannot_be_had() -> None:
    """An episode would be spent for nothing."""
    config = attrs.evolve(load_config(), files_offline=False, files_private_addresses=True, file_mirror=None)
    task = make_task(
        func="diff_text_file",
        result={"type": "vm_file", "path": "/home/user/a", "dest": "a"},
        expected={"type": "cloud_file", "path": "http://127.0.0.1:1/b", "dest": "b"},
    )
    async with open_host(config) as host:
        with pytest.raises(SetupFailed, match=r"'http://127\.0\.0\.1:1/b' cannot be had"):
            await host.create(task)
        assert not host.slots
