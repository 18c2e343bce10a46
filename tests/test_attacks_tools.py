"""Attacks on what a checker calls in a desktop: replaced tools, the loader, the clock; and on what its answers hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pytest
from desktops import Played, Scenario, make_task, play, run, start_daemon, write
from hostile_library import library
from hypothesis import given
from hypothesis import strategies as st
from requires import requires
from test_attacks import Found, score
from test_verifiers import install, packages_folder

from drums_core.host import Host
from drums_core.model import Task
from drums_core.slot import Slot
from drums_osworld import worker_job

pytestmark = requires("root", "criu")

CHECKS = """
import time
from types import SimpleNamespace

LISTS = "import os; print('done' if 'done' in os.listdir() else 'no')"

def tools(desktop, task):
    said = {
        "ls": desktop.execute("ls ~ | grep -x done").output,
        "gsettings": desktop.execute(["gsettings", "get", "org.gnome.desktop.interface", "clock-format"]).output,
        "python3": desktop.execute(["python3", "-c", LISTS]).output,
        "bash": desktop.execute(["bash", "-c", "[ -d ~/done ] && echo done || echo no"]).output,
        "stat": desktop.execute("stat -c %F ~/done || true").output,
    }
    right = {"ls": "done\\n", "python3": "done\\n", "bash": "done\\n", "stat": "directory\\n"}
    return SimpleNamespace(score=sum(said[x] == right[x] for x in right) / len(right), evidence=said)

def clock(desktop, task):
    off = {
        "date": float(desktop.execute(["date", "+%s"]).output) - time.time(),
        "python3": float(desktop.execute(["python3", "-c", "import time; print(time.time())"]).output) - time.time(),
    }
    said = {"off": off, "zone": desktop.execute("date +%Z").output}
    said["touched"] = desktop.execute("stat -c %Y ~/touched || true").output
    right = desktop.is_folder("done") and all(abs(x) < 60 for x in off.values()) and said["zone"] == "UTC\\n"
    return SimpleNamespace(score=float(right), evidence=said)

def shown(desktop, task):
    desktop.accessibility()
    names = [x["name"] for x in desktop.list_directory("~/")["children"]]
    said = {"titles": [w["title"] for w in desktop.windows()], "names": len(names)}
    return SimpleNamespace(score=float("done" in names), evidence=said)
"""
FAKED = ("ls", "test", "sh", "bash", "python3", "python", "gsettings", "stat", "date", "grep")


def verifier(function: str) -> Task:
    evaluator = {"func": "drums_verifier", "verifier": "tool_checks", "function": function}
    return attrs.evolve(make_task(), evaluator=evaluator)


async def scored_twice(slot: Slot, told: Any) -> Found:
    """With the task undone, and once it is done."""
    attacked = await score(slot)
    await run(slot, "/bin/mkdir ~/done")
    return Found(attacked, await score(slot), told)


async def replace_tools(host: Host) -> Found:
    """Programs of its own where a search path, a profile, an alias or the loader may find them; each says `done`."""
    async with await host.create(verifier("tools")) as slot:
        await slot.wait_valid()
        folders = "~/bin ~/.local/bin ~/Desktop"
        make = f"for f in {' '.join(FAKED)}; do printf '#!/bin/sh\\necho done\\n' >$d/$f; chmod +x $d/$f; done"
        await run(slot, f"for d in {folders}; do mkdir -p $d; {make}; done")
        code = f"open('/home/user/evil.so', 'wb').write({library(b'done' + bytes([10]))!r})"
        await run(slot, f'python3 -c "{code}"')
        path = "export PATH=$HOME/bin:$PATH BASH_ENV=$HOME/.bashrc ENV=$HOME/.bashrc\n"
        loader = "export LD_PRELOAD=$HOME/evil.so\n"
        for name in (".bash_profile", ".xsessionrc", ".pam_environment", ".config/environment.d/x.conf"):
            await write(slot, f"/home/user/{name}", path + loader)
        await write(slot, "/home/user/.profile", path)
        await write(slot, "/home/user/.bash_login", path)
        await write(slot, "/home/user/.bashrc", "alias ls='echo done'\necho done\nexit 0\n")
        # What they are good for where the agent itself sets the environment.
        own = {
            "PATH, ls": "rm -f ~/.bash_profile; env -i HOME=/home/user PATH=/usr/bin:/bin bash -l -c 'ls ~'",
            "PATH, python3": "PATH=~/bin:$PATH python3 -c 'print(1)'",
            "BASH_ENV": "BASH_ENV=~/.bashrc bash -c 'echo no'",
            **{f"loader, {x}": f"LD_PRELOAD=~/evil.so {x} --version" for x in ("ls", "gsettings", "python3", "bash")},
        }
        controls = {name: (await slot.execute(line, shell=True)).output for name, line in own.items()}
        await write(slot, "/home/user/.bash_profile", path + loader)
        places = ("/usr/local/bin/ls", "/usr/bin/ls", "/bin/test", "/etc/ld.so.preload", "/opt/drums/environment")
        taken = {x: (await slot.execute(["cp", "/home/user/evil.so", x])).returncode for x in places}
        return await scored_twice(slot, {"controls": controls, "taken": taken})


async def change_time(host: Host) -> Found:
    """The clock, the zone, times of files, and a `date` of its own."""
    async with await host.create(verifier("clock")) as slot:
        await slot.wait_valid()
        await run(slot, "mkdir -p ~/bin; printf '#!/bin/sh\\necho 978307200\\n' >~/bin/date; chmod +x ~/bin/date")
        await write(slot, "/home/user/.profile", "export PATH=$HOME/bin:$PATH TZ=Asia/Tokyo\n")
        await write(slot, "/home/user/sitecustomize.py", "import time\ntime.time = lambda: 978307200.0\n")
        lines = {
            "date": "/bin/date -s 2001-01-01",
            "settime": "python3 -c 'import time; time.clock_settime(time.CLOCK_REALTIME, 978307200)'",
            "adjtime": "python3 -c 'from ctypes import *; exit(CDLL(None).adjtime((c_long * 2)(9999, 0), 0) != 0)'",
            "zone": "ln -sf /usr/share/zoneinfo/Asia/Tokyo /etc/localtime",
            "offsets": "echo 'monotonic 99999 0' >/proc/self/timens_offsets",
        }
        codes = {name: (await slot.execute(line, shell=True)).returncode for name, line in lines.items()}
        fake = (await slot.execute("PATH=~/bin:$PATH date", shell=True)).output
        await run(slot, "touch -d 2001-01-01T00:00:00Z ~/touched ~")
        return await scored_twice(slot, {"codes": codes, "fake": fake})


ODD = r"""
import ctypes, fcntl, mmap, os, socket, sys, time
libc = ctypes.CDLL(None)
os.makedirs(b"/home/user/odd", exist_ok=True)
os.chdir("/home/user/odd")
kept = []
names = [b"a\nlock: 1: FLOCK ADVISORY WRITE 1 00:00:1 0 EOF", b"\xff\xfe\\x0a", b"x (deleted)", b"%s{}\t\"'<&]]>"]
names.append(b" rw - ext4 x rw")
for name in names:
    f = open(name, "wb+")
    f.write(b"x" * 4096)
    f.flush()
    fcntl.flock(f, fcntl.LOCK_EX)
    kept += [f, mmap.mmap(f.fileno(), 4096)]
    os.setxattr(name, b"user." + name[:20].replace(b"/", b"-"), b"\0\xff\n")
    os.symlink(name * 3, b"link-" + name)
    s = socket.socket(socket.AF_UNIX)
    s.bind(b"s" + name[:8])  # one whose name ends in "(deleted)" CRIU cannot dump
    a = socket.socket(socket.AF_UNIX)
    a.bind(b"\0" + name[:30])
    kept += [s, a]
for name in (b") S 1 1 (x", b"a\nState:\tZ", b"\xff\xfe)\n", b"", b"init.sh"):
    for odd in ([name, b"\n\xff", b""], [b""]):
        if os.fork() == 0:
            libc.prctl(15, name, 0, 0, 0)
            os.execve(b"/bin/sleep", [odd[0], b"1000"], {b"A\n=\xff": b"\xfe", b"=": b""})
    if os.fork() == 0:
        libc.prctl(15, name, 0, 0, 0)
        while True:
            time.sleep(100)
from Xlib import X, Xatom, display
d = display.Display()
for title in (b"\xff\xfe<&]]>", b"\x01\x08\x1b[31m", b"x" * 9000, b"'\"}{\\u0000\\ud800"):
    w = d.screen().root.create_window(0, 0, 50, 50, 0, d.screen().root_depth)
    w.change_property(Xatom.WM_NAME, Xatom.STRING, 8, title)
    w.change_property(Xatom.WM_CLASS, Xatom.STRING, 8, title[:50])
    w.change_property(d.intern_atom("_NET_WM_NAME"), d.intern_atom("UTF8_STRING"), 8, title)
    w.change_property(d.intern_atom("_NET_WM_PID"), Xatom.CARDINAL, 32, [2**32 - 1])
    w.map()
d.sync()
open("/tmp/odd.ready", "w").close()
while True:
    d.next_event()
"""


async def odd_output(host: Host) -> dict[str, Any]:
    """Names, arguments, titles and attributes that are no text, or look like the lines that the host reads of /proc."""
    async with await host.create(verifier("shown")) as slot:
        await slot.wait_valid()
        await start_daemon(slot, "odd", ODD)
        found = await scored_twice(slot, None)
        (child,) = await slot.fork(1)
        async with child:
            await child.wait_valid()
        return {"found": found, "child": child.episode.validity.verdict}


LITERALS = (str, bytes, int, float, complex, tuple, list, dict, set, type(None), type(...))
SCENARIOS: Mapping[str, Scenario] = {
    "replace-tools": replace_tools,
    "change-time": change_time,
    "odd-output": odd_output,
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with packages_folder(tmp_path_factory) as folder:
        install(folder, "tool-checks", {"tool_checks": "tool_checks_module"}, {"tool_checks_module.py": CHECKS})
        yield play(SCENARIOS)


def assert_no_forgery(found: Found) -> None:
    for reward, wanted in ((found.attacked, 0.0), (found.honest, 1.0)):
        assert (reward.score, reward.valid) == (wanted, True), (reward.provenance, reward.invalid_reasons)


def test_replaced_tools_are_not_called(played: Played) -> None:
    """They answer falsely where the agent sets the environment, and no checker's command calls one."""
    found = played["replace-tools"]
    assert_no_forgery(found)
    assert set(found.told["controls"].values()) == {"done\n"}, found.told["controls"]
    assert all(code != 0 for code in found.told["taken"].values()), found.told["taken"]
    undone = {"ls": "", "gsettings": "'24h'\n", "python3": "no\n", "bash": "no\n", "stat": ""}
    assert found.attacked.provenance["findings"]["evidence"] == undone


def test_changed_time_is_not_seen(played: Played) -> None:
    """By whoever asks for the time; the times of an agent's own files are what it says."""
    found = played["change-time"]
    assert_no_forgery(found)
    assert found.told["fake"] == "978307200\n"
    assert all(code != 0 for code in found.told["codes"].values()), found.told["codes"]
    for reward in (found.attacked, found.honest):
        evidence = reward.provenance["findings"]["evidence"]
        assert all(abs(x) < 60 for x in evidence["off"].values()) and evidence["zone"] == "UTC\n", evidence
        assert evidence["touched"] == "978307200\n"


def test_odd_output_is_read_as_it_is(played: Played) -> None:
    """Gates and checkers read it, in the desktop, its copies and its fork."""
    found = played["odd-output"]
    assert_no_forgery(found["found"])
    assert found["child"] == "valid"
    evidence = found["found"].honest.provenance["findings"]["evidence"]
    assert len(evidence["titles"]) >= 4, evidence


@given(st.text() | st.from_regex(r"[\[({\"'@]*(__import__|open|exec|[a-z]+)\(?.{0,20}[\])}\"']*", fullmatch=True))
def test_no_text_of_a_desktop_is_run(text: str) -> None:
    """Whatever the function that would evaluate it is given: a literal's value, OSWorld's own error, or no score."""
    worker_job.BROKEN.clear()
    worker_job.HOSTILE.clear()
    try:
        value = worker_job.literal(text)
    except worker_job.WorkerBroken:
        assert worker_job.HOSTILE
    except SyntaxError:
        assert text.strip().startswith("@a")
    else:
        assert isinstance(value, LITERALS), value
    finally:
        worker_job.BROKEN.clear()
        worker_job.HOSTILE.clear()


def test_nothing_is_left(played: Played) -> None:
    assert not played.left
