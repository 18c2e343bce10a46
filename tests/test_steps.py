"""The set-up step types: their parameters, the placeholders, and what counts as a failure."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pluggy
import pytest
import trio
from trio.testing import MockClock

from drums.errors import ConfigError, GuestError, SetupFailed
from drums_core import hookspecs
from drums_core.abc import Accounts, CommandResult, Step
from drums_core.config import HostConfig
from drums_core.task_files.mirror import mirrored_path
from drums_core.task_files.obtain import obtain
from drums_osworld.steps import (
    activate_window,
    change_wallpaper,
    chrome_close_tabs,
    chrome_open_tabs,
    close_window,
    command,
    download,
    execute,
    execute_with_verification,
    googledrive,
    launch,
    login,
    sleep,
    update_browse_history,
)
from drums_osworld.steps import open as open_step
from drums_osworld.steps.activate_window import ActivateWindow
from drums_osworld.steps.change_wallpaper import ChangeWallpaper
from drums_osworld.steps.chrome_close_tabs import ChromeCloseTabs
from drums_osworld.steps.chrome_open_tabs import ChromeOpenTabs
from drums_osworld.steps.close_window import CloseWindow
from drums_osworld.steps.download import Download
from drums_osworld.steps.execute import Execute, provisions
from drums_osworld.steps.execute_with_verification import ExecuteWithVerification
from drums_osworld.steps.googledrive import GoogleDrive
from drums_osworld.steps.launch import Launch
from drums_osworld.steps.login import Login
from drums_osworld.steps.open import Open
from drums_osworld.steps.parameters import Command
from drums_osworld.steps.placeholders import fill
from drums_osworld.steps.sleep import Sleep
from drums_osworld.steps.update_browse_history import UpdateBrowseHistory


@attrs.define
class Context:
    """Records what a step does; `results` are handed out in turn, the last one for ever."""

    results: list[CommandResult | Exception] = attrs.field(factory=lambda: [CommandResult(0, "", "")])
    screen: tuple[int, int] = (1920, 1080)
    calls: list[tuple[str, Any, bool]] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    kept: dict[str, str] = attrs.field(factory=dict)
    file_mirror: Path | None = None
    has_acted: bool = False
    accounts: Accounts = attrs.field(factory=Accounts)
    windows: set[str] = attrs.field(factory=set)
    uploaded: dict[str, bytes] = attrs.field(factory=dict)

    async def fetch(self, url: str) -> bytes:
        return await obtain(HostConfig(file_mirror=self.file_mirror, files_offline=True), url)

    async def open_file(self, path: str, *, timeout_s: float = 120.0) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("open_file", path, timeout_s > 0))

    async def activate_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        await trio.lowlevel.checkpoint()
        self.calls.append(("activate_window", (name, by_class), strict))
        return name in self.windows

    async def close_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        await trio.lowlevel.checkpoint()
        self.calls.append(("close_window", (name, by_class), strict))
        return name in self.windows

    async def upload(self, path: str, content: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.uploaded[path] = content

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
        if isinstance(self.results[0], Exception):
            raise self.results[0]

    def note(self, text: str) -> None:
        self.notes.append(text)

    def keep_output(self, name: str, text: str) -> None:
        self.kept[name] = text


async def run(step: Step, parameters: dict[str, Any], context: Context) -> None:
    await step.run(context, step.parse(parameters))


def test_each_is_registered_under_its_name() -> None:
    manager = pluggy.PluginManager("drums")
    manager.add_hookspecs(hookspecs)
    browser = (chrome_close_tabs, chrome_open_tabs, update_browse_history)
    others = (change_wallpaper, download, execute_with_verification, googledrive, login)
    for plugin in (execute, command, launch, sleep, open_step, activate_window, close_window, *browser, *others):
        manager.register(plugin)
    made: dict[str, Step] = {}

    def register(step_type: str, factory: Any) -> None:
        made[step_type] = factory()

    manager.hook.drums_register_setup_steps(register=register)
    manager.check_pending()
    assert set(made) == {
        "execute",
        "execute_with_verification",
        "command",
        "launch",
        "sleep",
        "open",
        "activate_window",
        "close_window",
        "change_wallpaper",
        "chrome_close_tabs",
        "chrome_open_tabs",
        "download",
        "googledrive",
        "login",
        "update_browse_history",
    }


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
        (Open(), {"path": "/home/user/a.txt"}),
        (Open(), {"path": "mousepad"}),
        (ActivateWindow(), {"window_name": "a.txt - LibreOffice Calc", "strict": True}),
        (CloseWindow(), {"window_name": "Mail.thunderbird", "strict": True, "by_class": True}),
        (Download(), {"files": [{"url": "https://x/resolve/main/a", "path": "/home/user/a"}]}),
        (Download(), {"files": []}),
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
        (Open(), {}, "path"),
        (Open(), {"path": " "}, "a file or a program is needed"),
        (Open(), {"path": "a\0"}, "a file or a program is needed"),
        (Open(), {"path": ["a"]}, r"@ \$\.parameters\.path"),
        (Open(), {"path": "a", "timeout": 1}, "timeout"),
        (ActivateWindow(), {"window_name": ""}, "a title or a class is needed"),
        (ActivateWindow(), {"window_name": "x", "strict": 1}, r"@ \$\.parameters\.strict"),
        (CloseWindow(), {"strict": True}, "window_name"),
        (CloseWindow(), {"window_name": 1}, r"@ \$\.parameters\.window_name"),
        (CloseWindow(), {"window_name": "x", "name": "y"}, "name"),
        (Download(), {}, "files"),
        (Download(), {"files": {"url": "u", "path": "p"}}, r"@ \$\.parameters\.files"),
        (Download(), {"files": [{"url": "u"}]}, "path"),
        (Download(), {"files": [{"url": "u", "path": "p"}, {"url": 1, "path": "p"}]}, r"files\[1\]\.url"),
        (Download(), {"files": [{"url": "u", "path": ""}]}, "path of file 0"),
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


@pytest.mark.parametrize("step", [Execute(), Launch()])
async def test_a_program_that_is_not_there_is_the_images_fault_until_an_agent_has_acted(step: Step) -> None:
    parameters = {"command": ["/home/user/own"], **({"stdout": "kept"} if isinstance(step, Execute) else {})}
    absent = GuestError("No such file or directory: '/home/user/own'", guest_status=404)
    with pytest.raises(GuestError):
        await run(step, parameters, Context([absent]))
    context = Context([absent], has_acted=True)
    await run(step, parameters, context)
    assert len(context.notes) == 1 and "No such file" in context.notes[0] and context.kept == {}
    with pytest.raises(GuestError):  # out of time, or not asked at all
        await run(step, parameters, Context([GuestError("timed out", guest_status=500)], has_acted=True))


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


async def test_verification_waits_for_a_window_and_a_command(autojump_clock: MockClock) -> None:
    step, good, nothing = ExecuteWithVerification(), CommandResult(0, "", ""), CommandResult(1, "", "")
    wanted = {"window_exists": "Gedit", "command_success": "pgrep gedit"}
    windows = CommandResult(0, "0x1  0 host Notes - gedit\n", "")
    context = Context([good, good, windows, nothing, windows, good])
    began = trio.current_time()
    await run(step, {"command": ["gedit"], "verification": wanted}, context)
    assert trio.current_time() - began == pytest.approx(2.0) and len(context.calls) == 6
    assert ("execute", "pgrep gedit", True) in context.calls
    context = Context([nothing, good])
    await run(step, {"command": "ls /x"}, context)
    assert len(context.calls) == len(context.notes) == 1
    for one, told in (("window_exists", "no window 'Gedit'"), ("command_success", "did not end with 0 but 1")):
        parameters = {"command": "gedit", "verification": {one: wanted[one]}, "max_wait_time": 3}
        with pytest.raises(SetupFailed, match=f"{told}.* within 3 s"):
            await run(step, parameters, Context([good, nothing]))


async def test_sleep_sleeps(autojump_clock: MockClock) -> None:
    start = trio.current_time()
    await run(Sleep(), {"seconds": 2.5}, Context())
    assert trio.current_time() - start == pytest.approx(2.5)


# --- windows and files


async def test_open_opens_and_windows_are_told() -> None:
    context = Context(windows={"b"})
    await run(Open(), {"path": "a.txt"}, context)
    await run(ActivateWindow(), {"window_name": "b", "strict": True}, context)
    await run(CloseWindow(), {"window_name": "b", "by_class": "true"}, context)
    assert context.calls == [
        ("open_file", "a.txt", True),
        ("activate_window", ("b", False), True),
        ("close_window", ("b", True), False),
    ]
    assert context.notes == []


async def test_a_window_that_is_not_there_is_noted() -> None:
    """OSWorld only logs it."""
    context = Context()
    await run(ActivateWindow(), {"window_name": "b", "strict": True}, context)
    await run(CloseWindow(), {"window_name": "c.C", "by_class": True}, context)
    assert context.notes == [
        "activate_window: there is no window with the title 'b' exactly",
        "close_window: there is no window with the class 'c.C'",
    ]


BASE = "https://huggingface.co/datasets/xlangai/ubuntu_osworld_file_cache/resolve/main"


def test_the_path_in_the_mirror() -> None:
    assert mirrored_path(f"{BASE}/a/b/Order%23%201.xlsx?download=true") == ("a", "b", "Order# 1.xlsx")


@pytest.mark.parametrize(
    "url",
    [
        "https://arxiv.org/pdf/2312.13771.pdf",
        "https:///a",
        "file:///x/resolve/main/a",
        f"{BASE}/",
        f"{BASE}/a//b",
        f"{BASE}/../secret",
        f"{BASE}/%2e%2e/secret",
        f"{BASE}/a%2F..%2F..%2Fsecret",
        f"{BASE}/a%00",
    ],
)
async def test_urls_that_no_mirror_has(url: str, tmp_path: Path) -> None:
    with pytest.raises(SetupFailed) as info:
        await run(Download(), {"files": [{"url": url, "path": "/x"}]}, Context(file_mirror=tmp_path))
    assert repr(url) in info.value.message and info.value.url == url


async def test_download_takes_files_from_the_mirror(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b c.txt").write_bytes(b"content")
    context = Context(file_mirror=tmp_path)
    await run(Download(), {"files": [{"url": f"{BASE}/a/b%20c.txt", "path": "Desktop/c.txt"}]}, context)
    assert context.uploaded == {"Desktop/c.txt": b"content"}


async def test_what_is_not_in_the_mirror_fails_the_set_up(tmp_path: Path) -> None:
    """Absent, a folder, a pipe, empty, too large, or not what the manifest says: each by its cause; nothing is sent."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "changed").write_bytes(b"1")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", (200 << 20) + 1)
    entry = {"file": "changed", "sha256": hashlib.sha256(b"2").hexdigest(), "size": 1}
    (tmp_path / "manifest.json").write_text(json.dumps([entry]))
    causes = {
        "absent": "is not in the mirror",
        "folder": "no regular file|directory",
        "pipe": "no regular file",
        "empty": "is empty",
        "large": "allowed are",
        "changed": "its manifest.json says",
    }
    context = Context(file_mirror=tmp_path)
    for name, cause in causes.items():
        with pytest.raises(SetupFailed, match=cause) as info:
            await run(Download(), {"files": [{"url": f"{BASE}/{name}", "path": "/x"}]}, context)
        assert info.value.url == f"{BASE}/{name}" and info.value.url in info.value.message
    with pytest.raises(SetupFailed, match="is not in the mirror"):
        await run(Download(), {"files": [{"url": f"{BASE}/a", "path": "/x"}]}, Context())
    assert context.uploaded == {}


async def test_an_empty_file_is_one_when_the_manifest_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    entry = {"file": "empty", "sha256": hashlib.sha256(b"").hexdigest(), "size": 0}
    (tmp_path / "manifest.json").write_text(json.dumps([entry]))
    context = Context(file_mirror=tmp_path)
    await run(Download(), {"files": [{"url": f"{BASE}/empty", "path": "/x"}]}, context)
    assert context.uploaded == {"/x": b""}


# --- the browser, the wallpaper; accounts are in test_google_drive.py and test_accounts.py


@pytest.mark.parametrize(
    ("step", "parameters"),
    [
        (ChromeOpenTabs(), {"urls_to_open": "http://a.example"}),
        (ChromeCloseTabs(), {"urls_to_close": [1]}),
        (ChromeCloseTabs(), {}),
        (UpdateBrowseHistory(), {"history": [{"url": "http://a.example", "title": "A"}]}),
        (ChangeWallpaper(), {"path": 1}),
        (Login(), {"platform": "googledrive"}),
        (GoogleDrive(), {"settings_file": "x", "operation": ["delete"], "args": 1}),
    ],
)
def test_wrong_parameters_of_the_other_steps(step: Step, parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as info:
        step.parse(parameters)
    assert info.value.faults and "$.parameters" in info.value.faults[0]


async def test_a_browser_that_does_not_answer_fails_the_set_up() -> None:
    context = Context([CommandResult(1, "", "the browser does not answer on port 9222: refused\n")])
    with pytest.raises(SetupFailed, match="does not answer on port 9222"):
        await run(ChromeOpenTabs(), {"urls_to_open": ["http://a.example"]}, context)


async def test_a_page_that_does_not_load_is_noted() -> None:
    context = Context([CommandResult(0, "'http://a.example' did not load: net::ERR_FAILED\n", "")])
    await run(ChromeOpenTabs(), {"urls_to_open": ["http://a.example"]}, context)
    assert context.notes == ["chrome_open_tabs: 'http://a.example' did not load: net::ERR_FAILED"]


async def test_a_history_that_is_not_written_fails_the_set_up() -> None:
    history = [{"url": "http://a.example", "title": "A", "visit_time_from_now_in_seconds": 5}]
    context = Context([CommandResult(1, "", "database is locked")])
    with pytest.raises(SetupFailed, match="database is locked"):
        await run(UpdateBrowseHistory(), {"history": history}, context)


async def test_a_picture_that_is_not_there_is_noted() -> None:
    context = Context([CommandResult(1, "", "")])
    await run(ChangeWallpaper(), {"path": "none.png"}, context)
    assert "none.png" in context.notes[0]
