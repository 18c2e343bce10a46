"""The conformance suites of set-up steps and of what they act through: the built-ins pass, each rule sees a breach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import trio
from desktops import Played, play
from requires import requires
from test_conformance import REGISTRY, broken

from drums.errors import ConfigError, GuestError, SetupFailed
from drums_core.abc import Step
from drums_core.host import Host
from drums_core.model import Json
from drums_core.setup import DesktopStepContext
from drums_core.testing import Check, FakeStepContext, check_step, check_step_context, require
from drums_core.testing.conformance_steps import SUITE_COMMANDS

FILE = "https://example.org/x/resolve/main/a.txt"
STEPS: dict[str, tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]] = {
    "execute": ([{"command": ["true"]}, {"command": "true", "shell": True}], [{}, {"command": 7}, {"command": []}]),
    "command": ([{"command": ["true"]}], [{}, {"command": ""}]),
    "execute_with_verification": (
        [{"command": ["true"]}, {"command": "true", "verification": {"command_success": "true"}}],
        [{}, {"command": "true", "verification": {"window": "x"}}, {"command": "true", "max_wait_time": 0}],
    ),
    "launch": ([{"command": ["xterm"]}, {"command": "xterm -e top"}], [{}, {"command": [1]}]),
    "sleep": ([{"seconds": 0}, {"seconds": 0.01}], [{}, {"seconds": -1}, {"seconds": "1"}, {"seconds": 1e9}]),
    "open": ([{"path": "/home/user/a.txt"}], [{}, {"path": 1}, {"path": ""}]),
    "activate_window": ([{"window_name": "x"}, {"window_name": "x", "strict": True}], [{}, {"window_name": ""}]),
    "close_window": ([{"window_name": "x"}], [{}, {"window_name": 1}]),
    "download": (
        [{"files": [{"url": FILE, "path": "/home/user/a.txt"}]}],
        [{}, {"files": [{"url": "", "path": "x"}]}, {"files": 1}],
    ),
}


# Those that come with the image for OSWorld's applications.
STEPS |= {
    "chrome_open_tabs": ([{"urls_to_open": ["https://example.org"]}], [{}, {"urls_to_open": 1}]),
    "chrome_close_tabs": ([{"urls_to_close": ["https://example.org"]}], [{}, {"urls_to_close": [1]}]),
    "change_wallpaper": ([{"path": "a.png"}], [{}, {"path": 1}]),
    "update_browse_history": (
        [{"history": [{"url": "https://example.org", "title": "x", "visit_time_from_now_in_seconds": 5}]}],
        [{}, {"history": [{}]}],
    ),
    "login": (
        [{"settings_file": "a.json", "platform": "googledrive"}],
        [{}, {"settings_file": "a.json", "platform": "x"}],
    ),
    "googledrive": ([{"settings_file": "a.json", "operation": ["delete"], "args": [{}]}], [{}, {"operation": 1}]),
}
ALWAYS_FAIL = {"login", "googledrive"}
"""Without an account; with one, they are in test_google_drive.py and test_accounts.py."""


def test_every_built_in_step_is_tried() -> None:
    """One that is new needs a line above: what tasks give it, and what they must not."""
    assert set(REGISTRY.steps) <= set(STEPS)


@pytest.mark.parametrize("name", sorted(REGISTRY.steps))
def test_the_built_in_steps(name: str) -> None:
    """All of them, with what tasks give and what they must not."""
    good, bad = STEPS[name]

    def context() -> FakeStepContext:
        return FakeStepContext(openable={"/home/user/a.txt"}, files={FILE: b"content"})

    factory = REGISTRY.steps[name][0]
    special = {"asks_nothing": name == "sleep", "always_fails": name in ALWAYS_FAIL}
    require(trio.run(lambda: check_step(factory, good=good, bad=bad, context=context, **special)))


class GoodStep:
    """Writes a file."""

    def parse(self, parameters: Mapping[str, Json]) -> object:
        if set(parameters) != {"path"} or not isinstance(parameters["path"], str):
            raise ConfigError("a path is needed", path="$.parameters.path")
        return parameters["path"]

    async def run(self, context: Any, parameters: object) -> None:
        await context.upload(str(parameters), b"")


class TakesAll(GoodStep):
    def parse(self, parameters: Mapping[str, Json]) -> object:
        return parameters.get("path")


class Pathless(GoodStep):
    def parse(self, parameters: Mapping[str, Json]) -> object:
        try:
            return super().parse(parameters)
        except ConfigError as e:
            raise ConfigError("no") from e


class Crashes(GoodStep):
    def parse(self, parameters: Mapping[str, Json]) -> object:
        return {"path": str(parameters["path"])}


class Pops(GoodStep):
    def parse(self, parameters: Any) -> object:
        found = super().parse(parameters)
        parameters.pop("path")
        return found


class Swallows(GoodStep):
    async def run(self, context: Any, parameters: object) -> None:
        try:
            await super().run(context, parameters)
        except GuestError:
            return


class NotAsync(GoodStep):
    def run(self, context: Any, parameters: object) -> Any: ...


BAD_STEPS: list[tuple[type[Any], str]] = [
    (TakesAll, "it refuses {}"),
    (TakesAll, "it refuses a parameter that it does not know"),
    (Pathless, "it refuses {}"),
    (Crashes, "it refuses {}"),
    (Pops, "it takes {'path': 'a'}"),
    (Swallows, "a desktop that does not answer fails it: {'path': 'a'}"),
    (NotAsync, "it has `parse`, and an async `run`"),
]


def checks_of(step: Callable[[], Step]) -> list[Check]:
    return trio.run(lambda: check_step(step, good=[{"path": "a"}], bad=[{}]))


def test_a_good_step_passes() -> None:
    """Every rule."""
    require(checks_of(GoodStep))


@pytest.mark.parametrize(("step", "rule"), BAD_STEPS, ids=lambda x: getattr(x, "__name__", None))
def test_a_bad_step_is_seen(step: type[Any], rule: str) -> None:
    """By the rule about it."""
    assert rule in broken(checks_of(step))


def test_a_step_that_always_fails() -> None:
    """It has to: one that does well is seen."""

    class Refuses(GoodStep):
        async def run(self, context: Any, parameters: object) -> None:
            raise SetupFailed("not here", output="")

    def checks(step: Callable[[], Step]) -> list[Check]:
        return trio.run(lambda: check_step(step, good=[{"path": "a"}], bad=[{}], always_fails=True))

    require(checks(Refuses))
    assert broken(checks(GoodStep)) == {"it fails: {'path': 'a'}"}


def test_the_fake_context_passes_the_suite_of_the_real_one() -> None:
    """The same rules; one that answers otherwise is seen."""
    require(trio.run(check_step_context, FakeStepContext(commands=SUITE_COMMANDS)))
    found = broken(trio.run(check_step_context, FakeStepContext(commands=SUITE_COMMANDS[1:])))
    assert found == {"a list is no shell's"}
    assert len(broken(trio.run(check_step_context, FakeStepContext(commands=SUITE_COMMANDS, silent=True)))) == 6


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    """The real context, of a real desktop."""

    async def context(host: Host) -> list[Check]:
        async with await host.create(ttl_s=600) as slot:
            return await check_step_context(DesktopStepContext(slot))

    yield play({"context": context})


@requires("root", "criu")
def test_the_real_context_passes_the_suite(played: Played) -> None:
    """Every rule, on a real desktop."""
    require(played["context"])
    assert played.left == []
