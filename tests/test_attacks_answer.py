"""Attacks on what a desktop is compared with: looking for it, asking for it, and reading it as a checker's worker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
from desktops import Played, Scenario, make_task, play, run, start_daemon, write
from requires import requires
from test_attacks import Found, score

from drums_core import load_config
from drums_core.host import Host
from drums_core.model import Reward, Task
from drums_core.slot import Slot

pytestmark = requires("root", "criu")
EXPECTED = "https://huggingface.co/datasets/xlangai/ubuntu_osworld_file_cache/resolve/main/set/"
SECRET = f"expected-{secrets.token_hex(16)}"
FILES = {"gold.txt": f"{SECRET}\n", "test.py": f"import answer\nNUMBER = 40 + 2  # {SECRET}\n"}
FILES["test.py"] += "def test():\n    return answer.answer() == NUMBER\n"

# Looks through all that it can read and that is not the image's, and through all processes, again and again. What it
# finds it hands in as its answer.
SEARCH = """
import os, sys, time
halves, once = sys.argv[1:3], len(sys.argv) > 3
secret = "".join(halves).encode()
skipped = ("/usr", "/proc", "/sys", "/lib", "/boot")
def readable():
    for top, folders, names in os.walk("/"):
        folders[:] = [x for x in folders if os.path.join(top, x) not in skipped]
        yield from (os.path.join(top, x) for x in names)
    for pid in [x for x in os.listdir("/proc") if x.isdigit()]:
        yield from (f"/proc/{pid}/{x}" for x in ("environ", "cmdline", "mountinfo", "maps"))
        try:
            yield from (f"/proc/{pid}/fd/{x}" for x in os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            pass
while True:
    for path in readable():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            continue
        try:
            found = secret in os.read(fd, 4 << 20)
        except OSError:
            found = False
        finally:
            os.close(fd)
        if found:
            print(path, flush=True)
            if not once:
                open("/home/user/answer.txt", "w").write(secret.decode() + "\\n")
    if once:
        break
    open("/tmp/search.ready", "a").write("x")
    time.sleep(0.05)
"""


class Listeners:
    """What listens on this host while the agent runs: on the loopback, on an address of it, and on an abstract name."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self._sockets: dict[str, socket.socket] = {}
        inet = [x.address for all_ in psutil.net_if_addrs().values() for x in all_ if x.family == socket.AF_INET]
        for address in ["127.0.0.1", *[x for x in inet if not x.startswith("127.")][:1]]:
            self._listen(socket.AF_INET, (address, 0))
        self._listen(socket.AF_UNIX, f"\0drums-test-{os.getpid()}")

    def _listen(self, family: int, address: Any) -> None:
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen()
        self._sockets[json.dumps(listener.getsockname(), default=bytes.decode)] = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.close()
                self.reached.append(str(listener.getsockname()))

    @property
    def addresses(self) -> list[Any]:
        return [json.loads(x) for x in self._sockets]

    def close(self) -> None:
        for listener in self._sockets.values():
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


CONNECT = """
import json, socket, sys
for address in json.loads(sys.argv[1]):
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    try:
        socket.socket(family).connect(address if isinstance(address, str) else tuple(address))
        print("reached", address)
    except OSError as e:
        print("not", address, e.strerror)
"""


def compared(function: str, answer: str, expected: str, *, sleep_s: float = 0) -> Task:
    evaluator = {
        "func": function,
        "result": {"type": "vm_file", "path": f"/home/user/{answer}", "dest": answer},
        "expected": {"type": "cloud_file", "path": EXPECTED + expected, "dest": expected},
        # While it runs all of the agent's processes live in the copy, and the checker's worker is there.
        "postconfig": [{"type": "sleep", "parameters": {"seconds": sleep_s}}],
    }
    return attrs.evolve(make_task(), evaluator=evaluator)


LISTENERS: list[Listeners] = []


async def look_everywhere(slot: Slot) -> list[str]:
    half = len(SECRET) // 2
    argv = ["python3", "/tmp/search.py", SECRET[:half], SECRET[half:], "once"]
    return (await slot.execute(argv, timeout_s=60)).output.splitlines()


async def read_the_answer(host: Host) -> dict[str, Any]:
    """It looks before, and without an end while it is graded."""
    async with await host.create(compared("compare_text_file", "answer.txt", "gold.txt", sleep_s=1)) as slot:
        await slot.wait_valid()
        await write(slot, "/tmp/search.py", SEARCH)
        await write(slot, "/tmp/connect.py", CONNECT)
        # That it does find what is there: in a file, in a process's environment, in a deleted file that is open.
        hold = f"W={SECRET} sleep 100 & exec 9>~/gone; echo {SECRET} >&9; rm ~/gone; sleep 100 & echo {SECRET} >~/there"
        await write(slot, "/tmp/hold.sh", hold)
        await run(slot, "bash /tmp/hold.sh </dev/null >/dev/null 2>&1; rm /tmp/hold.sh")
        control = await look_everywhere(slot)
        await run(slot, "pkill sleep; rm ~/there")
        before = await look_everywhere(slot)
        half = len(SECRET) // 2
        started = f"sys.argv = ['', '{SECRET[:half]}', '{SECRET[half:]}']\n"
        await start_daemon(slot, "search", "import sys\n" + started + SEARCH)
        attacked = await score(slot)
        rounds = len(await run(slot, "cat /tmp/search.ready"))
        found = await run(slot, "cat /tmp/search.log")
        addresses = json.dumps(LISTENERS[0].addresses)
        connected = (await slot.execute(["python3", "/tmp/connect.py", addresses])).output
        await run(slot, "pkill -f '[s]earch.py'; true")
        await write(slot, "/home/user/answer.txt", FILES["gold.txt"])
        honest = await score(slot)
        told = {"control": control, "before": before, "during": found, "rounds": rounds, "connected": connected}
        return {"found": Found(attacked, honest), **told}


# Right when it has reached nothing but what it is to be compared with. The checker passes no words of it on, but where
# it asks for a network address there is no score, and the error names the address.
LOOKS = """
import os, socket, subprocess, sys
def reached(path):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read(1)
        return True
    except OSError:
        return False
def answer():
    found = [x for x in PATHS if reached(x)]
    found += [x for x in os.environ if x.startswith("DRUMS") or "TOKEN" in x or "SECRET" in x]
    found += [x for x in os.listdir("/proc") if x.isdigit()][4:]
    # In a program of its own: no hook of this interpreter's stands in the way there.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", CONNECT, ADDRESSES], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    found += [x for x in lines if not x.startswith("not ")]
    if not lines or SECRET not in open("test.py").read():
        found.append("it could not look")
    if found:
        socket.getaddrinfo(f"reached {found[0]}"[-60:], 80)
    return 42
"""
FORGES = """
import re
def answer():
    return eval(re.search("NUMBER = ([0-9 +]+)", open("test.py").read())[1])
"""
CONNECTS = """
import socket
def answer():
    try: socket.create_connection(("127.0.0.1", 7070), 1)
    except BaseException: pass
    return 42
"""


async def agents_python(host: Host) -> dict[str, Reward]:
    """A file of the agent's that OSWorld's checker runs, beside another desktop."""
    state = load_config().state_dir
    found = {}
    task = compared("check_python_file_by_test_suite", "answer.py", "test.py")
    async with await host.create(make_task()) as other:
        assert other.desktop is not None
        paths = [str(x) for x in (state, state / "slots", other.desktop.folder, Path(str(host.config.file_mirror)))]
        paths += ["/etc/shadow", "/root/.bashrc", "/home", "/run", "/sys", f"/proc/1/root{state}"]
        addresses = json.dumps(LISTENERS[0].addresses)
        names = {"PATHS": paths, "SECRET": SECRET, "CONNECT": CONNECT, "ADDRESSES": addresses}
        looks = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + LOOKS
        answers = {"looks": looks}
        answers["looks, and finds"] = looks.replace("PATHS = [", "PATHS = ['/usr/bin', ")
        async with await host.create(task) as slot:
            await slot.wait_valid()
            for name, text in {**answers, "forges": FORGES, "connects": CONNECTS}.items():
                await write(slot, "/home/user/answer.py", text)
                found[name] = await score(slot)
    return found


SCENARIOS: Mapping[str, Scenario] = {"read-the-answer": read_the_answer, "agents-python": agents_python}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    mirror = tmp_path_factory.mktemp("mirror")
    (mirror / "set").mkdir()
    for name, text in FILES.items():
        (mirror / "set" / name).write_text(text)
    LISTENERS.append(Listeners())
    yield play(SCENARIOS, file_mirror=mirror)
    LISTENERS.pop().close()


def test_the_answer_is_nowhere(played: Played) -> None:
    """A search that finds it wherever it is put finds it nowhere, also while it is compared with; nobody is reached."""
    told = played["read-the-answer"]
    found = told["found"]
    for reward, wanted in ((found.attacked, 0.0), (found.honest, 1.0)):
        assert (reward.score, reward.valid) == (wanted, True), (reward.checker_error, reward.invalid_reasons)
    kinds = {re.sub(r"\d+", "N", x) for x in told["control"]}
    assert {"/home/user/there", "/proc/N/environ", "/proc/N/fd/N"} <= kinds, told["control"]
    assert told["before"] == [] and told["during"] == "" and told["rounds"] >= 2, told
    assert told["connected"].count("not ") == len(LISTENERS[0].addresses), told["connected"]
    assert LISTENERS[0].reached == []
    for address in LISTENERS[0].addresses:  # and there it was
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as s:
            s.connect(address if isinstance(address, str) else tuple(address))


def test_agents_python(played: Played) -> None:
    """The host, the daemon and other desktops are out of its reach. The expected file is not, nor its own score.

    The checker runs it beside the test that it is to pass, so it can read and answer that; the reward says so.
    """
    found = dict(played["agents-python"])
    connects, finds = found.pop("connects"), found.pop("looks, and finds")
    scores = {name: (reward.score, reward.checker_error) for name, reward in found.items()}
    assert scores == {"looks": (1.0, None), "forges": (1.0, None)}
    for reward in (connects, finds, *found.values()):
        assert reward.provenance["checker"]["forgeable"] == ["check_python_file_by_test_suite"]
        assert reward.valid
    assert finds.score is None and "'reached /usr/bin'" in str(finds.checker_error)
    assert connects.score is None and "127.0.0.1:7070 was asked for" in str(connects.checker_error)


def test_nothing_is_left(played: Played) -> None:
    assert not played.left
