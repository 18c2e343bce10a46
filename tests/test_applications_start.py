"""Nothing on the desktop of the image `osworld` asks, greets or locks by itself, at a first start nor after a kill.

Each application with a document is started twice, the second time after the first was killed. Both times its one window
is all that there is more than before. LibreOffice asks after a kill what to recover, as it does anywhere: that a window
more is seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from apps import APPS, OSWORLD, App
from desktops import Played, Scenario, make_task, play, run
from requires import osworld_files, requires

from drums_core.host import Host
from drums_core.model import SetupStep
from drums_core.setup import run_steps
from drums_core.slot import Slot

pytestmark = [requires("root", "criu", "osworld"), pytest.mark.applications]

AT_ONCE = 4
LOOKS = 5  # a second apart: what a dialog has to come up behind its window
# Every window that is shown and large enough to be read, also one that no window manager lists, as a bubble is.
_WINDOWS = """
import json
from Xlib import X, display, error
d = display.Display()
name = d.get_atom("_NET_WM_NAME")
found = {}
def look(window, depth):
    for w in window.query_tree().children:
        try:
            kind, at, shown = w.get_wm_class(), w.get_geometry(), w.get_attributes().map_state == X.IsViewable
            if shown and kind and at.width > 20 and at.height > 10:
                found[w.id] = f"{kind[1]}: {w.get_full_text_property(name) or w.get_wm_name() or ''}"
            elif depth:
                look(w, depth - 1)
        except error.BadWindow:
            pass
look(d.screen().root, 2)
print(json.dumps(found))
"""
# Nobody is asked for a password, and nothing goes dark or to sleep.
SETTINGS = {
    "org.gnome.desktop.lockdown disable-lock-screen": "true",
    "org.gnome.desktop.screensaver idle-activation-enabled": "false",
    "org.gnome.desktop.session idle-delay": "uint32 0",
    "org.gnome.settings-daemon.plugins.power sleep-inactive-ac-type": "'nothing'",
    "org.gnome.settings-daemon.plugins.power sleep-inactive-battery-type": "'nothing'",
    "org.gnome.shell welcome-dialog-last-shown-version": "'9999'",
}
LOCK = (
    "gdbus call --session --dest org.gnome.ScreenSaver --object-path /org/gnome/ScreenSaver "
    "--method org.gnome.ScreenSaver.Lock"
)
TIPS = "sed -i /ShowTipOfTheDay/d ~/.config/libreoffice/4/user/registrymodifications.xcu"


async def windows(slot: Slot) -> Mapping[str, str]:
    """Class and title of what is shown now, by id."""
    result = await slot.execute(["python3", "-c", _WINDOWS])
    assert result.returncode == 0, result
    found: Mapping[str, str] = json.loads(result.output)
    return found


async def start(slot: Slot, app: App, before: Mapping[str, str]) -> list[str]:
    """Open it, and what there is more than before within some seconds."""
    await run_steps(slot, app.opens)
    await app.wait_open(slot)
    more: dict[str, str] = {}
    for _ in range(LOOKS):
        await run(slot, "sleep 1")
        more |= {x: title for x, title in (await windows(slot)).items() if x not in before}
    return list(more.values())


def started_twice(app: App) -> Scenario:
    """What two starts showed, and how the application's state was after each."""

    async def scenario(host: Host) -> Any:
        steps = app.steps()
        async with await host.create(make_task(*steps[: len(steps) - len(app.opens)]), image="osworld") as slot:
            before = await windows(slot)
            found = {"first": await start(slot, app, before), "states": [await run(slot, app.state)]}
            its = f'wmctrl -lp | grep -- "{app.title}"'
            await run(slot, f"kill -9 $({its} | awk '{{print $3}}'); while {its}; do sleep 0.1; done; sleep 1")
            found["second"] = await start(slot, app, before)
            found["states"].append(await run(slot, app.state))
            assert slot.episode.notes == []
            return found

    return scenario


async def planted(host: Host) -> list[str]:
    """What a start shows where a switch is not set."""
    app = APPS["calc"]
    steps = app.steps()
    damage = SetupStep("execute", {"command": TIPS, "shell": True})
    async with await host.create(make_task(*steps[: len(steps) - len(app.opens)], damage), image="osworld") as slot:
        return await start(slot, app, await windows(slot))


async def locking(host: Host) -> Any:
    """What the settings say; and what asking for the lock does."""
    async with await host.create(image="osworld") as slot:
        values = {x: (await run(slot, f"gsettings get {x}")).strip() for x in SETTINGS}
        return {"values": values, "lock": await slot.execute(LOCK, shell=True), "server": await run(slot, "xset q")}


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Played:
    # Those that were selected, and no others.
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    names = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    scenarios = {name: started_twice(app) for name, app in APPS.items() if name in names}
    scenarios |= {x.__name__: x for x in (planted, locking)}
    return play(scenarios, at_once=AT_ONCE, file_mirror=osworld_files(OSWORLD))


@pytest.mark.parametrize("name", APPS)
def test_an_application_is_its_one_window(played: Played, name: str) -> None:
    """At its first start, and after it was killed."""
    found = played[name]
    for start in ("first", "second"):
        assert len(found[start]) == 1 and re.search(APPS[name].title, found[start][0]), found


def test_a_browser_has_the_one_tab(played: Played) -> None:
    """That it was told to open, both times."""
    assert played["chromium"]["states"] == ["1\n", "1\n"]


def test_a_hint_would_be_seen(played: Played) -> None:
    """Of LibreOffice, where the image's settings do not turn it off."""
    assert len(played["planted"]) == 2 and "Soffice: Tip of the Day" in str(played["planted"])


def test_nothing_locks(played: Played) -> None:
    """No setting does, nor the X server; and there is no lock to ask for."""
    found = played["locking"]
    assert found["values"] == SETTINGS
    assert found["lock"].returncode != 0 and "org.gnome.Shell.ScreenShield was not provided" in found["lock"].error
    assert re.search(r"timeout: +0 ", found["server"])


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
