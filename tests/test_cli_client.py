"""The client's commands: what they print, for people and for programs, and what they exit with."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from client_fake import TASK, TOKEN, Answer, FakeDaemon, a_task, as_json, fake_daemon, problem

import drums
from drums.cli import cli
from drums.errors import DrumsError

COMMANDS = ("tasks", "slots", "stats", "create", "step", "verify")
DRUMS = str(Path(sys.executable).with_name("drums"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with fake_daemon() as daemon:
        monkeypatch.setenv("DRUMS_URL", daemon.url)
        monkeypatch.setenv("DRUMS_TOKEN", TOKEN)
        yield daemon


def invoke(*argv: str, **options: Any) -> Result:
    return CliRunner().invoke(cli, argv, **options)


def output(*argv: str, **options: Any) -> str:
    result = invoke(*argv, **options)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def document(*argv: str) -> Any:
    return json.loads(output(*argv, "--json"))


def test_tasks(fake: FakeDaemon) -> None:
    """A line per task; counts and broken files on standard error."""
    result = invoke("tasks")
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert lines[0] == ["id", "domain", "supported", "instruction"]
    assert [line[2] for line in lines[1:]] == ["yes", "no"]
    assert "2 tasks, 1 supported (2 os)" in result.stderr and "broken: x.json: no JSON" in result.stderr
    assert document("tasks") == {"tasks": [a_task(), a_task(supported=False)], "broken": {"x.json": "no JSON"}}


def test_tasks_chosen(fake: FakeDaemon) -> None:
    """By domain, or those that are unsupported, with the reason; or one."""
    assert document("tasks", "--domain", "chrome")["tasks"] == []
    assert document("tasks", "--image", "none")["tasks"] == []
    assert [x["supported"] for x in document("tasks", "--image", "osworld")["tasks"]] == [True]
    assert "the agent itself acts as root" in output("tasks", "--unsupported")
    assert len(document("tasks", "--unsupported")["tasks"]) == 1
    shown = output("tasks", "e0df059f")
    assert re.search(rf"^id +{TASK}$", shown, re.M) and re.search(r"^checker +exact_match$", shown, re.M)
    assert document("tasks", "e0df059f") == a_task()
    fake.script("GET /v1/tasks/e0df059f", as_json(a_task(remarks=["`proxy: true` is not applied", "nor is x"])))
    assert re.search(r"^remarks +none$", shown, re.M)
    assert re.search(r"^remarks +`proxy: true` is not applied; nor is x$", output("tasks", "e0df059f"), re.M)
    assert isinstance(invoke("tasks", "00000000").exception, drums.TaskNotFound)


def test_a_life(fake: FakeDaemon) -> None:
    """create prints the id alone, which the others take."""
    slot = output("create", "e0df059f", "--ttl", "600", "--wait").strip()
    assert slot in fake.slots and fake.of("POST /v1/slots")[0].json == {
        "task": "e0df059f",
        "ttl": 600.0,
        "network": "none",
    }
    assert [line.split("\t")[0] for line in output("slots").splitlines()] == ["id", slot]
    assert output("step", slot, "pyautogui.click(1, 2)") == "pyautogui.click(1, 2)\n"
    assert output("step", slot, "-", input="a = 1\nprint(a)") == "a = 1\nprint(a)\n"
    assert document("step", slot, "DONE")["status"] == "success"
    assert re.search(r"^score +1.0$", output("verify", slot), re.M)
    assert document("verify", slot)["score"] == 1.0
    assert re.search(r"^state +up$", output("slots", "show", slot), re.M)
    shown = document("slots", "show", slot)
    assert shown["slot"]["id"] == slot and shown["report"]["validity"]["verdict"] == "valid"
    assert output("slots", "close", slot) == f"closed {slot}\n" and fake.slots == {}
    assert document("slots") == {"slots": []}


def test_stats(fake: FakeDaemon) -> None:
    """A line per group; what made episodes invalid has its cause."""
    header, line = (x.split("\t") for x in output("stats", "--by", "label").splitlines())
    assert header[:4] == ["policy", "episodes", "valid", "invalid"] and line[:4] == ["run-7", "4", "2", "2"]
    assert line[header.index("valid_rate")] == "0.500" and line[-1] == "no_app_crash (agent) 2"
    assert line[header.index("checker error causes")] == "agent 1"
    assert document("stats")[0]["checker_errors"] == 1 and document("stats", "--all")[0]["query"]["all"] == "true"


def test_create_options(fake: FakeDaemon) -> None:
    """As given; no --ttl is the host's default."""
    assert document("create", "--image", "osworld", "--checkpoint", "c", "--network", "nat", "--ttl", "unlimited")
    document("create")
    document("create", "--label", "policy=run=7", "--label", "seed=1")
    assert [asked.json for asked in fake.of("POST /v1/slots")] == [
        {"image": "osworld", "checkpoint": "c", "network": "nat", "ttl": None},
        {"network": "none"},
        {"network": "none", "labels": {"policy": "run=7", "seed": "1"}},
    ]
    assert "'policy' is not NAME=TEXT" in invoke("create", "--label", "policy").stderr
    refused = invoke("create", "--ttl", "soon")
    assert refused.exit_code == 2 and "neither a number of seconds nor 'unlimited'" in refused.stderr
    assert isinstance(invoke("create", "--ttl", "nan").exception, drums.ConfigError)


def test_create_and_wait_for_what_is_invalid(fake: FakeDaemon) -> None:
    """Fails, and says which desktop is still there."""
    fake.verdict = "invalid"
    result = invoke("create", TASK, "--wait")
    assert isinstance(result.exception, drums.InvalidEpisode) and result.stdout == ""
    assert f"{next(iter(fake.slots))} is left as it is" in result.stderr


def test_a_step_that_fails(fake: FakeDaemon) -> None:
    """What it printed, in its place, and exit code 1."""
    slot = output("create").strip()
    fake.script("POST .*/step", as_json({"status": "error", "output": "a\n", "error": "NameError", "returncode": 1}))
    result = invoke("step", slot, "nonsense")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "a\n", "NameError\n")
    result = invoke("step", slot, "nonsense", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["error"] == "NameError"


def test_a_reward_that_is_not_valid(fake: FakeDaemon) -> None:
    """Printed in any case; strictness is the exit code."""
    slot = output("create", TASK).strip()
    fake.slots[slot] |= {"state": "quarantined", "reason": "broken page"}
    result = invoke("verify", slot)
    assert isinstance(result.exception, drums.InvalidEpisode)
    assert "skipped  quarantined: broken page" in result.stdout and "score    -" in result.stdout
    result = invoke("verify", slot, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["valid"] is False
    assert "quarantined" in output("verify", slot, "--no-strict")


def test_what_is_scored(fake: FakeDaemon) -> None:
    """And whether it is kept: as the host is configured, unless the caller says which."""
    slot = output("create", TASK).strip()
    for flags in ((), ("--in-place",), ("--copy", "--keep"), ("--no-keep",)):
        output("verify", slot, *flags)
    told = [asked.json for asked in fake.of("POST .*/verify")]
    assert told == [{}, {"in_place": True}, {"in_place": False, "keep": True}, {"keep": False}]


def test_a_terminal_is_not_driven_by_what_is_printed(fake: FakeDaemon) -> None:
    """Instructions, reasons and names are others' words: no escape sequence of theirs comes through."""
    fake.script(
        "GET /v1/tasks", as_json({"tasks": [a_task(instruction="a\x1b[2Jb\nc\td")], "broken": {"\x1b[1m": "x"}})
    )
    result = invoke("tasks")
    assert "\x1b" not in result.output and "a [2Jb c d" in result.stdout
    assert len(result.stdout.splitlines()) == 2


def test_columns_on_a_terminal(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned, and cut at its width."""
    import click

    from drums.commands import output as module

    lines: list[str] = []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "echo", lines.append)
    monkeypatch.setenv("COLUMNS", "20")
    module.print_table(["id", "state"], [["d-1", "up"], ["d-2345", "x" * 100]])
    assert lines == ["id      state", "d-1     up", "d-2345  " + "x" * 12]


# --- the process


def drums_command(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([DRUMS, *argv], capture_output=True, text=True, timeout=60, env={**os.environ, **environ})


def test_errors_are_told_in_words(fake: FakeDaemon) -> None:
    """One line, and the remedy on a second one; exit code 1, no traceback."""
    done = drums_command("step", "d-none", "WAIT")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "drums: no slot 'd-none'\n")
    fake.script("GET /v1/slots", problem("slot_busy", 409, detail="busy", hint="try again"))
    assert drums_command("slots").stderr == "drums: busy\n  (try again)\n"
    fake.script("GET /v1/slots", Answer(401))
    done = drums_command("slots", DRUMS_TOKEN="", DRUMS_STATE_DIR="/nonexistent")
    assert done.returncode == 1 and "DRUMS_TOKEN" in done.stderr and "Traceback" not in done.stderr
    done = drums_command("tasks", DRUMS_URL="http://example.com")
    assert done.returncode == 1 and "plain HTTP" in done.stderr and TOKEN not in done.stderr


def test_without_a_daemon() -> None:
    """A command whose desktop would end with a daemon of its own starts none."""
    for argv in (("slots",), ("create",), ("step", "d-1", "WAIT"), ("verify", "d-1")):
        done = drums_command(*argv, DRUMS_URL="http://127.0.0.1:1", DRUMS_TOKEN=TOKEN)
        assert done.returncode == 1 and "drums serve" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_whole_help_has_an_example_of_each(command: str) -> None:
    """`test_cli_help.py` looks at each command's own."""
    assert f"drums {command}" in output("--help")


def test_completion() -> None:
    """The help says how to switch it on, and it completes the client's commands."""
    assert "_DRUMS_COMPLETE=bash_source drums" in output("--help")
    for shell, words in (("bash", "drums st"), ("zsh", "drums st")):
        done = drums_command(_DRUMS_COMPLETE=f"{shell}_complete", COMP_WORDS=words, COMP_CWORD="1")
        assert "step" in done.stdout, done
    done = drums_command(_DRUMS_COMPLETE="bash_complete", COMP_WORDS="drums verify --", COMP_CWORD="2")
    assert "--no-strict" in done.stdout


def test_start_up(capsys: pytest.CaptureFixture[str]) -> None:
    """What a command costs before it asks is printed; that the HTTP library is not part of it is held."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        drums_command("slots", "--help")
        times.append((time.perf_counter() - began) * 1000)
    with capsys.disabled():
        print(f"\ndrums slots --help: {min(times):.0f} ms at best, {sorted(times)[2]:.0f} ms in the middle")
    code = "import sys; from drums.cli import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    for command in COMMANDS:
        done = subprocess.run([sys.executable, "-c", code, command, "--help"], capture_output=True, text=True)
        assert not {"httpx2", "cattrs", "attrs", "trio", "asyncio", "drums_core"} & set(done.stdout.split()), command


def test_the_errors_of_commands_are_the_clients() -> None:
    """main() tells them; the commands themselves raise them."""
    assert issubclass(drums.DaemonUnreachable, DrumsError)


def test_a_command_in_a_script_s_background_can_be_ended() -> None:
    """There SIGINT is ignored from the start; SIGTERM ends it all the same, with its clean-up."""
    code = "import time, drums.cli; drums.cli._end_on_signals()\n"
    code += "try:\n    print('up', flush=True)\n    time.sleep(60)\nfinally:\n    print('cleaned up')"
    script = f'"{sys.executable}" -c "$CODE" & echo $!; wait'
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, env={"CODE": code}) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        try:
            assert process.stdout.readline() == "up\n"
            os.kill(number, signal.SIGTERM)
            process.wait(10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        assert process.stdout.read() == "cleaned up\n"
