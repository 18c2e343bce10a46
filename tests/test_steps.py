"""The set-up step types: their parameters, the placeholders, and what counts as a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pluggy
import pytest
import trio
from trio.testing import MockClock

from drums.errors import ConfigError, GuestError, SetupFailed
from drums_core import hookspecs
from drums_core.abc import CommandResult, Step
from drums_osworld.steps import command, execute, launch, sleep
from drums_osworld.steps.execute import Execute, provisions
from drums_osworld.steps.launch import Launch
from drums_osworld.steps.parameters import Command
from drums_osworld.steps.placeholders import fill
from drums_osworld.steps.sleep import Sleep


@attrs.define
class Context:
    """Records what a step does; `results` are handed out in turn, the last one for ever."""

    results: list[CommandResult | Exception] = attrs.field(factory=lambda: [CommandResult(0, "", "")])
    screen: tuple[int, int] = (1920, 1080)
    calls: list[tuple[str, Any, bool]] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    kept: dict[str, str] = attrs.field(factory=dict)

    async def execute(
        self, command: str | Sequence[str], *, shell: bool = False, timeout_s: float = 120.0
    ) -> CommandResult:
        await trio.lowlevel.checkpoint()
        self.calls.append(("execute", command, shell))
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return result

    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("launch", command, shell))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def keep_output(self, name: str, text: str) -> None:
        self.kept[name] = text


async def run(step: Step, parameters: dict[str, Any], context: Context) -> None:
    await step.run(context, step.parse(parameters))


def test_each_is_registered_under_its_name() -> None:
    manager = pluggy.PluginManager("drums")
    manager.add_hookspecs(hookspecs)
    for plugin in (execute, command, launch, sleep):
        manager.register(plugin)
    made: dict[str, Step] = {}

    def register(step_type: str, factory: Any) -> None:
        made[step_type] = factory()

    manager.hook.drums_register_setup_steps(register=register)
    manager.check_pending()
    assert set(made) == {"execute", "command", "launch", "sleep"}


@pytest.mark.parametrize(
    ("step", "parameters"),
    [
        (Execute(), {"command": ["ls", "-l"]}),
        (Execute(), {"command": "ls | wc", "shell": True}),
        (Execute("command"), {"command": "ls", "shell": "true"}),
        (Execute(), {"command": ["ls"], "stdout": "ls.out", "stderr": "ls.err", "until": {"returncode": 0}}),
        (Launch(), {"command": ["vlc"]}),
        (Launch(), {"command": "vlc &", "shell": "true"}),
        (Sleep(), {"seconds": 1}),
        (Sleep(), {"seconds": 0.5}),
    ],
)
def test_parameters_of_osworld_are_taken(step: Step, parameters: dict[str, Any]) -> None:
    step.parse(parameters)


@pytest.mark.parametrize(
    ("step", "parameters", "fault"),
    [
        (Execute(), {}, "command"),
        (Execute(), {"command": ""}, r"@ \$\.parameters\.command"),
        (Execute(), {"command": []}, r"@ \$\.parameters\.command"),
        (Execute(), {"command": ["ls", 1]}, r"@ \$\.parameters\.command"),
        (Execute(), {"command": "ls", "shell": "false"}, r"@ \$\.parameters\.shell"),
        (Execute(), {"command": "ls", "shell": 1}, r"@ \$\.parameters\.shell"),
        (Execute(), {"command": "ls", "cwd": "/"}, "cwd"),
        (Execute(), {"command": "ls", "stdout": 1}, r"@ \$\.parameters\.stdout"),
        (Execute(), {"command": "ls", "stdout": "../../etc/x"}, "not a plain file name"),
        (Execute(), {"command": "ls", "stderr": ".."}, "not a plain file name"),
        (Execute(), {"command": "ls", "until": {"returncode": "0"}}, r"@ \$\.parameters\.until\.returncode"),
        (Execute(), {"command": "ls", "until": {"code": 0}}, "code"),
        (Launch(), {"command": "vlc", "stdout": "x"}, "stdout"),
        (Sleep(), {"seconds": "1"}, r"@ \$\.parameters\.seconds"),
        (Sleep(), {"seconds": -1}, "allowed is 0 to 600"),
        (Sleep(), {"seconds": float("nan")}, "allowed is 0 to 600"),
        (Sleep(), {"seconds": True}, r"@ \$\.parameters\.seconds"),
    ],
)
def test_wrong_parameters_are_refused_by_path(step: Step, parameters: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as info:
        step.parse(parameters)
    assert info.value.path.startswith("$.parameters")


def test_placeholders() -> None:
    assert fill("{CLIENT_PASSWORD} {SCREEN_WIDTH}x{SCREEN_HEIGHT}", (1920, 1081)) == "password 1920x1081"
    assert fill("{SCREEN_WIDTH_HALF},{SCREEN_HEIGHT_HALF}", (1920, 1081)) == "960,540"
    assert fill("awk '{print $1}' {OTHER} {}", (1, 1)) == "awk '{print $1}' {OTHER} {}"


async def test_placeholders_are_filled_in_commands_only() -> None:
    context = Context()
    await run(Execute(), {"command": "echo {CLIENT_PASSWORD}", "shell": "true"}, context)
    await run(Execute("command"), {"command": ["x", "{SCREEN_WIDTH_HALF}"]}, context)
    await run(Launch(), {"command": ["x", "{SCREEN_WIDTH}"]}, context)
    assert context.calls == [
        ("execute", "echo password", True),
        ("execute", ("x", "960"), False),
        ("launch", ("x", "{SCREEN_WIDTH}"), False),
    ]
    assert context.notes == []


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("echo {CLIENT_PASSWORD} | sudo -S mkdir ~/Desktop/x", True),
        ("sudo mkdir x", True),
        (("bash", "-c", "true && sudo apt install jq -y"), True),
        (("sudo", "-S", "mkdir", "x"), True),
        ("(sudo -u root true)", True),
        ("echo {CLIENT_PASSWORD} | sudo -S su - charles", False),
        ("ls ~/sudoers; echo pseudo sudoku", False),
        ("python -c 'print(1)'", False),
    ],
)
def test_which_commands_provide(line: str | tuple[str, ...], answer: bool) -> None:
    assert provisions(Command(line)) is answer


async def test_failed_command_is_noted_and_failed_sudo_stops() -> None:
    context = Context([CommandResult(2, "out", "no such file")])
    await run(Execute(), {"command": "ls /x"}, context)
    assert context.notes == ["execute: 'ls /x' ended with code 2: no such file"]
    with pytest.raises(SetupFailed, match="ended with code 2") as info:
        await run(Execute(), {"command": "echo {CLIENT_PASSWORD} | sudo -S mkdir /x", "shell": True}, context)
    assert info.value.output == "outno such file" and info.value.returncode == 2
    assert "password" not in str(info.value).replace("{CLIENT_PASSWORD}", "")


async def test_desktop_that_cannot_be_asked_stops() -> None:
    with pytest.raises(GuestError):
        await run(Execute(), {"command": "ls"}, Context([GuestError("no answer")]))


async def test_output_is_kept_for_the_checker() -> None:
    context = Context([CommandResult(0, "out", "err")])
    await run(Execute(), {"command": "ls", "stdout": "a", "stderr": "b"}, context)
    assert context.kept == {"a": "out", "b": "err"}


async def test_until_repeats(autojump_clock: MockClock) -> None:
    fails = CommandResult(1, "", "")
    context = Context([fails, fails, CommandResult(0, "ready\n", "")])
    await run(Execute(), {"command": "probe", "until": {"stdout": "ready"}}, context)
    assert len(context.calls) == 3
    context = Context([fails])
    await run(Execute(), {"command": "probe", "until": {}}, context)
    assert len(context.calls) == len(context.notes) == 1
    with pytest.raises(SetupFailed, match="did not come to"):
        await run(Execute(), {"command": "probe", "until": {"returncode": 0}}, Context([fails]))


async def test_sleep_sleeps(autojump_clock: MockClock) -> None:
    start = trio.current_time()
    await run(Sleep(), {"seconds": 2.5}, Context())
    assert trio.current_time() - start == pytest.approx(2.5)
