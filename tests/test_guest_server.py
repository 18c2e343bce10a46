"""The guest server in a throw-away desktop: an overlay over a built image, in namespaces of its own.

The image is the one that DRUMS_TEST_ROOTFS names, or the one in the state folder. Without root or an image the
tests skip, and fail instead where DRUMS_REQUIRE asks for them. One file, though a long one: all of it shares the one
desktop that its module boots.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import importlib
import json
import os
import re
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h11
import pytest
import trio
from requires import requires

from drums.errors import GuestError
from drums_core import guest_client
from drums_core.guest_gateway import serve_guest

GUEST = Path(__file__).parent.parent / "drums_core" / "guest"
BUILT = Path(os.environ.get("DRUMS_STATE_DIR", "/var/lib/drums"), "images/minimal/rootfs")
FALLBACK = Path("/var/lib/drums-dev/rootfs-latest")
ROOTFS = Path(os.environ.get("DRUMS_TEST_ROOTFS") or (BUILT if BUILT.exists() else FALLBACK))
SECRET = "0123456789abcdef" * 4
CLONE_NEWNET = 0x40000000

# What the host does before it starts pid 1, without user namespace, seccomp filter and cgroup. The guest's files come
# from the working tree, so that the tests are about these and not about those of the day of the build.
START = """
set -eu
work=$1 rootfs=$2 guest=$3
mount --make-rprivate /
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay -o "lowerdir=$rootfs,upperdir=$work/upper,workdir=$work/work" overlay "$work/root"
cd "$work/root"
rm -rf opt/drums/guest
mkdir -p opt/drums/guest
cp "$guest"/*.py "$guest"/*.sh opt/drums/guest/
chown -R 0:0 opt/drums/guest
chmod 755 opt/drums/guest opt/drums/guest/*.sh
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero full random urandom tty; do touch "dev/$node"; mount --bind "/dev/$node" "dev/$node"; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mkdir -p run/user/1000 tmp/.X11-unix
chown 1000:1000 run/user/1000
chmod 700 run/user/1000
chmod 1777 tmp/.X11-unix
ip link set lo up
hostname desktop
pivot_root . mnt
exec chroot . /bin/sh -c 'umount -l /mnt; exec /usr/bin/tini -- /opt/drums/guest/init.sh' </dev/null >/dev/null 2>&1
"""


class Desktop:
    """A running throw-away desktop; `pid` is its pid 1 on the host."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.root = Path(f"/proc/{pid}/root")

    def connect(self) -> socket.socket:
        """A connection to the guest server, made in the desktop's network namespace."""
        made: list[socket.socket] = []
        failed: list[OSError] = []

        def enter() -> None:
            # The namespace is the thread's alone; the socket stays in it.
            namespace = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
                made.append(socket.create_connection(("127.0.0.1", 5000), timeout=30))
            except OSError as error:
                failed.append(error)
            finally:
                os.close(namespace)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return made[0]

    def send(self, method: str, target: str, body: bytes, fields: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """One request as it is given; the reply's status, header and trailer fields, and body."""
        lines = {"Host": "desktop", "Content-Length": str(len(body)), **fields}
        head = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items()), "", ""]
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method=method, target="/", headers=[("Host", "desktop")]))
        client.send(h11.EndOfMessage())
        status, content = 0, bytearray()
        answered: dict[str, str] = {}
        with self.connect() as connection:
            connection.sendall("\r\n".join(head).encode() + body)
            while True:
                event = client.next_event()
                if event is h11.NEED_DATA:
                    data = connection.recv(1 << 16)
                    if not data:
                        raise OSError("the reply was cut short")
                    client.receive_data(data)
                elif isinstance(event, h11.Data):
                    content += event.data
                elif isinstance(event, h11.Response | h11.EndOfMessage):
                    answered |= {name.decode(): value.decode() for name, value in event.headers}
                    if isinstance(event, h11.EndOfMessage):
                        return status, answered, bytes(content)
                    status = event.status_code

    def ask(
        self,
        method: str,
        target: str,
        body: bytes | dict[str, Any] = b"",
        *,
        secret: str = SECRET,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """One signed request; its status and body. What the server did not refuse must be proven."""
        headers = dict(headers or {})
        if isinstance(body, dict):
            body = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        signed = sign(method, target, body, headers, secret=secret)
        status, answered, content = self.send(method, target, body, signed)
        if status == 401:
            assert "x-drums-proof" not in answered
        else:
            digest = hashlib.sha256(content).hexdigest()
            wanted = guest_client.reply_proof(secret, signed["X-Drums-Nonce"], status, answered["content-type"], digest)
            assert answered["x-drums-proof"] == wanted
        return status, content

    def execute(self, command: str | list[str], **more: Any) -> dict[str, Any]:
        """Runs a command (text by the shell) and returns the reply's document."""
        body = {"command": command, "shell": isinstance(command, str), **more}
        status, answer = self.ask("POST", "/execute", body)
        assert status == 200, answer
        document: dict[str, Any] = json.loads(answer)
        return document

    def server_pids(self) -> tuple[int, int]:
        """The server and the spawner, as the desktop numbers them."""
        found = self.execute("pgrep -o -f guest/server.py; pgrep -n -u 900 -f guest/server.py")["output"].split()
        return int(found[0]), int(found[1])


def sign(
    method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None, *, secret: str = SECRET
) -> dict[str, str]:
    """The fields of a request with those that sign it."""
    headers = dict(headers or {})
    nonce, digest = secrets.token_hex(16), hashlib.sha256(body).hexdigest()
    content_type = headers.get("Content-Type", "")
    signature = guest_client.request_signature(secret, nonce, method, target, content_type, digest)
    return {**headers, "X-Drums-Nonce": nonce, "X-Drums-Body-SHA256": digest, "X-Drums-Signature": signature}


def unmet() -> str:
    """What these tests lack on this machine; empty when nothing."""
    if os.geteuid() != 0:
        return "root"
    if not (ROOTFS / "usr/bin/tini").exists():
        return f"an image at {ROOTFS}"
    return ""


@pytest.fixture(scope="module")
def desktop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desktop]:
    lack = unmet()
    if lack:
        if os.environ.get("DRUMS_REQUIRE"):
            pytest.fail(f"the guest server's tests need {lack}")
        pytest.skip(f"needs {lack}")
    work = tmp_path_factory.mktemp("desktop")
    namespaces = ["--mount", "--pid", "--fork", "--kill-child", "--net", "--uts", "--ipc"]
    command = ["unshare", *namespaces, "sh", "-c", START, "start", str(work), str(ROOTFS.resolve()), str(GUEST)]
    starter = subprocess.Popen(command)
    try:
        yield wait_ready(starter)
    finally:
        starter.kill()
        starter.wait()
        shutil.rmtree(work, ignore_errors=True)


def wait_ready(starter: subprocess.Popen[bytes]) -> Desktop:
    """Waits for the session and the server, and writes the tests' secret."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert starter.poll() is None, "the desktop ended"
        children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
        if children and b"tini" in Path(f"/proc/{children[0]}/cmdline").read_bytes().split(b"\0")[0]:
            desktop = Desktop(int(children[0]))
            secret = desktop.root / "run/drums-guest/secret"
            if (
                secret.exists()
                and secret.stat().st_size == 64
                and (desktop.root / "run/user/1000/session-ready").exists()
            ):
                assert secret.stat().st_mode & 0o777 == 0o600
                with secret.open("r+b") as file:
                    file.write(SECRET.encode())
                # The session may be ready first.
                with contextlib.suppress(ConnectionRefusedError):
                    desktop.connect().close()
                    return desktop
        time.sleep(0.05)
    raise AssertionError("the desktop did not start in time")


# --- who may ask, and who answers ---


def test_a_signed_request_gets_a_proven_reply(desktop: Desktop) -> None:
    """`ask` checks the proof, here of replies of every kind: small, an error, a picture."""
    status, body = desktop.ask("GET", "/health")
    assert (status, json.loads(body)["status"]) == (200, "ok")
    for method, target, expected in (
        ("GET", "/nothing?a=b", 404),
        ("POST", "/health", 405),
        ("GET", "/screenshot", 200),
    ):
        assert desktop.ask(method, target)[0] == expected


ROUTES = [("GET", "/health"), ("POST", "/execute"), ("GET", "/nothing")]


@pytest.mark.parametrize("secret", ["", "0" * 64, SECRET[:-1], SECRET + "0"])
def test_a_signature_with_another_secret_is_refused(desktop: Desktop, secret: str) -> None:
    for method, target in ROUTES:
        status, body = desktop.ask(method, target, b"{}" * 1000, secret=secret)
        assert (status, json.loads(body)["status"]) == (401, "error")


@pytest.mark.parametrize(
    "change",
    [
        {"X-Drums-Signature": "0" * 64},
        {"X-Drums-Signature": ""},
        {"X-Drums-Signature": "\xe9"},
        {"X-Drums-Nonce": "0" * 32},
        {"X-Drums-Body-SHA256": hashlib.sha256(b"{}").hexdigest()},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"X-Drums-Nonce": None},
        {"X-Drums-Body-SHA256": None},
        {"X-Drums-Signature": None},
    ],
    ids=str,
)
def test_tampered_fields_are_refused(desktop: Desktop, change: dict[str, str | None]) -> None:
    for method, target in ROUTES:
        fields = {**sign(method, target, b"[]", {"Content-Type": "application/json"}), **change}
        sent = {name: value for name, value in fields.items() if value is not None}
        status, answered, _ = desktop.send(method, target, b"[]", sent)
        assert (status, "x-drums-proof" in answered) == (401, False)


def test_a_tampered_request_is_refused(desktop: Desktop) -> None:
    body = b'{"command": ["touch", "/home/user/tampered"]}'
    for method, target, sent in (
        ("POST", "/execute", body.replace(b"touch", b"TOUCH")),
        ("POST", "/setup/execute", body),
        ("POST", "/execute?", body),
        ("GET", "/execute", body),
        ("POST", "/execute", body + b" "),
    ):
        status, answered, _ = desktop.send(method, target, sent, sign("POST", "/execute", body))
        assert (status, "x-drums-proof" in answered) == (401, False)
    fields = {**sign("POST", "/execute", body), "Content-Length": "x"}
    status, answered, _ = desktop.send("POST", "/execute", body, fields)
    assert (status, "x-drums-proof" in answered) == (400, False)
    assert desktop.execute("ls /home/user/tampered")["returncode"] != 0


def test_a_nonce_must_be_one(desktop: Desktop) -> None:
    for nonce in ("", "0" * 31, "0" * 33, "G" * 32, "A" * 32):
        digest = hashlib.sha256(b"").hexdigest()
        signature = guest_client.request_signature(SECRET, nonce, "GET", "/health", "", digest)
        fields = {"X-Drums-Nonce": nonce, "X-Drums-Body-SHA256": digest, "X-Drums-Signature": signature}
        assert desktop.send("GET", "/health", b"", fields)[0] == 401, nonce


def test_a_replayed_request_is_refused(desktop: Desktop) -> None:
    body = b'{"command": "echo x >> /home/user/replayed", "shell": true}'
    fields = sign("POST", "/execute", body)
    assert desktop.send("POST", "/execute", body, fields)[0] == 200
    for _ in range(2):
        status, answered, _ = desktop.send("POST", "/execute", body, fields)
        assert (status, "x-drums-proof" in answered) == (401, False)
    assert desktop.execute("cat /home/user/replayed")["output"] == "x\n"


def test_a_malformed_target_costs_nothing(desktop: Desktop) -> None:
    before = desktop.server_pids()
    assert desktop.send("GET", "http://[", b"", {})[0] == 401
    assert desktop.ask("GET", "http://[")[0] == 500
    assert desktop.server_pids() == before


async def test_the_hosts_client_asks_and_believes_the_server(desktop: Desktop) -> None:
    """Through guest_client.py and the desktop's own network namespace, as in production."""
    netns = os.open(f"/proc/{desktop.pid}/ns/net", os.O_RDONLY)
    try:
        client = guest_client.GuestClient(netns, SECRET)
        await client.health()
        await client.call("POST", "/execute", {"command": "head -c 3000001 /dev/zero > zeros", "shell": True})
        form = [("Content-Type", "application/x-www-form-urlencoded")]
        reply = await client.request("POST", "/file", b"file_path=zeros", form)
        assert (reply.status, reply.content_type, reply.body) == (200, "application/octet-stream", bytes(3000001))
        assert (await client.request("POST", "/file", b"file_path=absent", form)).status == 404
        with pytest.raises(GuestError, match="does not know this desktop's secret"):
            await guest_client.GuestClient(netns, "0" * 64).health()
    finally:
        os.close(netns)


def test_strangers_that_say_nothing_keep_nobody_out(desktop: Desktop) -> None:
    idle = [desktop.connect() for _ in range(200)]
    try:
        assert desktop.ask("GET", "/health")[0] == 200
    finally:
        for connection in idle:
            connection.close()


def test_many_commands_at_once_leave_health_its_thread(desktop: Desktop) -> None:
    busy = [
        threading.Thread(target=desktop.ask, args=("POST", "/execute", {"command": ["sleep", "1"]})) for _ in range(9)
    ]
    for thread in busy:
        thread.start()
    started = time.monotonic()
    assert desktop.ask("GET", "/health")[0] == 200
    assert time.monotonic() - started < 0.8
    for thread in busy:
        thread.join()


# --- commands ---


def test_commands_run_as_the_user_without_rights(desktop: Desktop) -> None:
    answer = desktop.execute("id -u; id -g; id -G; pwd; cat /proc/self/status; env")
    assert (answer["status"], answer["returncode"], answer["error"]) == ("success", 0, "")
    lines = answer["output"].splitlines()
    assert lines[:4] == ["1000", "1000", "1000", "/home/user"]
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[kind], 16) == 0, kind
    assert status["NoNewPrivs"] == "1"
    assert status["Uid"].split() == ["1000"] * 4
    for line in ("HOME=/home/user", "DISPLAY=:0", "LANG=C.UTF-8", "XDG_RUNTIME_DIR=/run/user/1000"):
        assert line in lines


def test_execute_speaks_osworlds_dialect(desktop: Desktop) -> None:
    assert desktop.execute(["sh", "-c", "echo a; echo b >&2; exit 3"]) == {
        "status": "success",
        "output": "a\n",
        "error": "b\n",
        "returncode": 3,
    }
    status, body = desktop.ask("POST", "/setup/execute", {"command": "echo 'a  b' ~/x", "shell": False})
    assert (status, json.loads(body)["output"]) == (200, "a  b /home/user/x\n")
    status, body = desktop.ask("POST", "/execute", {"command": ["no-such-program"]})
    assert (status, json.loads(body)["status"]) == (404, "error")
    assert "No such file or directory: 'no-such-program'" in json.loads(body)["message"]
    for wrong in (b"no json", b"[]", {"command": 7}, {"command": ""}, {"command": "'"}, {"command": ["a\0b"]}):
        assert desktop.ask("POST", "/execute", wrong)[0] == 400, wrong
    assert desktop.ask("GET", "/execute")[0] == 405
    assert desktop.ask("GET", "/nothing")[0] == 404


def test_timeout_kills_the_whole_session(desktop: Desktop) -> None:
    started = time.monotonic()
    command = "sleep 7001 & (sleep 7001; true) & sh -c 'sleep 7001'"
    status, body = desktop.ask("POST", "/execute", {"command": command, "shell": True, "timeout": 0.5})
    assert status == 500
    assert "timed out" in json.loads(body)["message"]
    assert time.monotonic() - started < 3
    assert desktop.execute("pgrep -fc '[s]leep 7001'")["output"] == "0\n"


def test_background_processes_hold_nothing_up(desktop: Desktop) -> None:
    started = time.monotonic()
    assert desktop.execute("sleep 5 & echo done")["output"] == "done\n"
    assert time.monotonic() - started < 2


def test_long_output_is_cut_and_says_so(desktop: Desktop) -> None:
    answer = desktop.execute("head -c 20000000 /dev/zero | tr '\\0' x; echo e >&2")
    assert (len(answer["output"]), answer["error"]) == (8 << 20, "e\n")
    assert answer["output_truncated"] is True
    assert "error_truncated" not in answer


def test_launch_does_not_wait(desktop: Desktop) -> None:
    started = time.monotonic()
    assert desktop.ask("POST", "/setup/launch", {"command": ["sleep", "7002"]})[0] == 200
    assert time.monotonic() - started < 2
    parent = desktop.execute("ps -o ppid= -p $(pgrep -f '[s]leep 7002')")["output"]
    assert int(parent) == 1
    desktop.execute("pkill -f '[s]leep 7002'")
    assert desktop.ask("POST", "/setup/launch", {"command": ["no-such-program"]})[0] == 404


def test_python_runs_in_a_loaded_interpreter(desktop: Desktop) -> None:
    code = (
        "import pyautogui, sys, os; pyautogui.FAILSAFE = False; pyautogui.moveTo(321, 123); print(pyautogui.position())"
    )
    status, body = desktop.ask("POST", "/run_python", {"code": code + "; print(os.getuid(), sys.argv, __name__)"})
    document = json.loads(body)
    assert (status, document["status"], document["returncode"]) == (200, "success", 0), document
    assert document["output"].splitlines() == ["Point(x=321, y=123)", "1000 ['-c'] __main__"]
    assert json.loads(desktop.ask("GET", "/cursor_position")[1]) == [321, 123]
    document = json.loads(desktop.ask("POST", "/run_python", {"code": "print('a')\n1/0"})[1])
    assert (document["status"], document["returncode"], document["output"]) == ("error", 1, "a\n")
    assert document["error"].splitlines()[0] == "Traceback (most recent call last):"
    assert document["error"].splitlines()[1] == '  File "<string>", line 2, in <module>'
    assert json.loads(desktop.ask("POST", "/run_python", {"code": "raise SystemExit(7)"})[1])["returncode"] == 7
    assert json.loads(desktop.ask("POST", "/run_python", {"code": "import guest"})[1])["returncode"] == 1


def test_osworld_actions_use_the_loaded_interpreter(desktop: Desktop) -> None:
    code = "import pyautogui; import time; pyautogui.FAILSAFE = False; pyautogui.moveTo(50, 60); print(pyautogui.PAUSE)"
    started = time.monotonic()
    assert desktop.execute(["python", "-c", code])["output"] == "0.1\n"
    assert time.monotonic() - started < 1
    assert json.loads(desktop.ask("GET", "/cursor_position")[1]) == [50, 60]


# --- the screen ---


def test_screenshot_is_the_screen_with_the_pointer(desktop: Desktop) -> None:
    assert json.loads(desktop.ask("POST", "/screen_size")[1]) == {"width": 1920, "height": 1080}
    move = "import pyautogui; pyautogui.FAILSAFE=False; pyautogui.moveTo({0}, {0})"
    pictures = []
    for place in (400, 700):
        desktop.ask("POST", "/run_python", {"code": move.format(place)})
        status, body = desktop.ask("GET", "/screenshot")
        assert (status, body[:8]) == (200, b"\x89PNG\r\n\x1a\n"), body[:500]
        assert struct.unpack(">II", body[16:24]) == (1920, 1080)
        pictures.append(body)
    assert pictures[0] != pictures[1]


def _rows(picture: bytes) -> list[bytes]:
    """The rows of a PNG file of the screen, each 1920 times red, green and blue; every check sum is looked at."""
    at, packed = 8, b""
    while at < len(picture):
        (size,) = struct.unpack_from(">I", picture, at)
        kind, data = picture[at + 4 : at + 8], picture[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", picture, at + 8 + size) == (zlib.crc32(kind + data),)
        packed += data if kind == b"IDAT" else b""
        at += 12 + size
    rows = zlib.decompress(packed)
    line = 1 + 3 * 1920
    assert len(rows) == 1080 * line and not any(rows[::line])
    return [rows[y * line + 1 : (y + 1) * line] for y in range(1080)]


def test_screenshot_is_every_pixel(desktop: Desktop) -> None:
    """Of the half that the pointer is not in, beside what Pillow gets of the display by another request."""
    code = "import pyautogui; pyautogui.FAILSAFE=False; pyautogui.moveTo(100, 100)"
    desktop.ask("POST", "/run_python", {"code": code})
    desktop.execute("xsetroot -mod 3 5 -fg '#123456' -bg '#fedcba'")
    grab = "from PIL import ImageGrab; import hashlib\n"
    grab += "half = ImageGrab.grab(xdisplay=':0').convert('RGB').crop((960, 0, 1920, 1080))\n"
    grab += "print(hashlib.sha256(half.tobytes()).hexdigest(), len(half.getcolors(1 << 24)))"
    digest, colours = desktop.execute(["python3", "-c", grab])["output"].split()
    status, body = desktop.ask("GET", "/screenshot")
    assert status == 200 and int(colours) > 1
    half = b"".join(row[3 * 960 :] for row in _rows(body))
    assert hashlib.sha256(half).hexdigest() == digest
    # No shared memory stays behind.
    assert desktop.execute("tail -n +2 /proc/sysvipc/shm | awk '$5 == 900 || $8 == 900' | wc -l")["output"] == "0\n"


def test_the_pointer_is_whole_wherever_it_is(desktop: Desktop) -> None:
    """The screen is fetched in strips; a pointer that lies in two of them, or half off the screen, is drawn whole."""
    desktop.execute("xsetroot -solid '#336699'")
    shapes = []
    for y in (420, 410, 416 - 1, 416, 1076):
        code = f"import pyautogui; pyautogui.FAILSAFE=False; pyautogui.moveTo(960, {y})"
        desktop.ask("POST", "/run_python", {"code": code})
        rows = _rows(desktop.ask("GET", "/screenshot")[1])
        shapes.append([row[3 * 920 : 3 * 1000] for row in rows[max(0, y - 40) : y + 40]])
    whole = shapes[0]
    assert len({pixel for row in whole for pixel in zip(*[iter(row)] * 3, strict=True)}) > 2  # not the wall alone
    assert shapes[1] == shapes[2] == shapes[3] == whole
    assert shapes[4] == whole[: len(shapes[4])] and len(shapes[4]) == 44


def test_window_size(desktop: Desktop) -> None:
    desktop.ask("POST", "/setup/launch", {"command": ["xterm", "-geometry", "80x24"]})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    deadline = time.monotonic() + 10
    while True:
        status, body = desktop.ask("POST", "/window_size", b"app_class_name=XTerm", headers=form)
        if status == 200 or time.monotonic() > deadline:
            break
    assert json.loads(body)["width"] > 100, body
    desktop.execute("pkill xterm")
    for wanted, expected in ((b"app_class_name=Nothing", 404), (b"app_class_name=Ter", 404), (b"", 400)):
        assert desktop.ask("POST", "/window_size", wanted, headers=form)[0] == expected


# --- windows, the accessibility tree and scripts


def ask_json(desktop: Desktop, method: str, target: str, **document: Any) -> tuple[int, Any]:
    """A request with a JSON body; the status, and the reply's document or text."""
    status, body = desktop.ask(method, target, document or b"")
    try:
        return status, json.loads(body)
    except ValueError:
        return status, body.decode()


def titles(desktop: Desktop) -> list[str]:
    return [window["title"] for window in ask_json(desktop, "GET", "/windows")[1]["windows"]]


def wait_titles(desktop: Desktop, wanted: Callable[[list[str]], bool]) -> list[str]:
    deadline = time.monotonic() + 10
    while not wanted(found := titles(desktop)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_open_file_waits_for_its_window(desktop: Desktop) -> None:
    """A file by its program, a folder, a program by its name; each is in front afterwards. A home path is expanded."""
    desktop.execute("mkdir -p ~/papers; echo 'dear reader' > ~/letter.txt")
    for path, title in (("~/letter.txt", "letter.txt"), ("/home/user/papers", "papers"), ("xterm", "xterm")):
        status, said = ask_json(desktop, "POST", "/setup/open_file", path=path, timeout_seconds=20)
        assert (status, said) == (200, "File opened and window activated successfully")
        windows = ask_json(desktop, "GET", "/windows")[1]["windows"]
        shown = [w for w in windows if title in w["title"] or title in w["class"]]
        assert len(shown) == 1 and shown[0]["width"] > 50, windows
        assert wait_active(desktop, shown[0]["id"])
    desktop.execute("pkill xterm; pkill mousepad; pkill pcmanfm")
    assert wait_titles(desktop, lambda found: not found) == []


def wait_active(desktop: Desktop, identity: str) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        windows = ask_json(desktop, "GET", "/windows")[1]["windows"]
        if any(w["active"] and w["id"] == identity for w in windows):
            return True
        time.sleep(0.05)
    return False


def test_open_file_does_not_take_another_window_for_its_own(desktop: Desktop) -> None:
    """A file named by one letter, which is in the title of every window, and one whose name ends another's."""
    desktop.execute("echo x > ~/a; echo x > ~/data.txt; echo x > ~/a.txt")
    for name in ("a", "a.txt"):
        ask_json(desktop, "POST", "/setup/open_file", path="/home/user/data.txt", timeout_seconds=20)
        assert any("data.txt" in title for title in titles(desktop))
        status, said = ask_json(desktop, "POST", "/setup/open_file", path=f"/home/user/{name}", timeout_seconds=20)
        assert status == 200, said
        assert any(re.search(rf"/{name}(?![\w.])", title) for title in titles(desktop))
        desktop.execute("pkill mousepad")
        wait_titles(desktop, lambda found: not found)


def test_open_file_refuses_what_is_not_there(desktop: Desktop) -> None:
    status, said = ask_json(desktop, "POST", "/setup/open_file", path="/home/user/none.txt")
    assert (status, said["message"]) == (404, "Application/file not found: /home/user/none.txt")
    for document in ({"path": ""}, {"path": 1}, {"path": "a", "window_name": 1}, {"path": "a", "timeout_seconds": "1"}):
        assert ask_json(desktop, "POST", "/setup/open_file", **document)[0] == 400
    assert ask_json(desktop, "POST", "/setup/open_file", path="a\0b")[0] == 400


def test_open_file_gives_up_at_its_limit(desktop: Desktop) -> None:
    """A program without a window."""
    began = time.monotonic()
    status, said = ask_json(desktop, "POST", "/setup/open_file", path="true", timeout_seconds=1)
    assert status == 500 and "Failed to find window for 'true' within 1 seconds" in said["message"]
    assert 1 <= time.monotonic() - began < 5


def test_windows_are_activated_and_closed(desktop: Desktop) -> None:
    """By a part of the title whatever its case, by the whole title, by the class; none is 404."""
    for title in ("First Window", "Second window"):
        desktop.ask("POST", "/setup/launch", {"command": ["xterm", "-T", title, "-e", "sleep 60"]})
    wait_titles(desktop, lambda found: len(found) == 2)
    by_title = {w["title"]: w["id"] for w in ask_json(desktop, "GET", "/windows")[1]["windows"]}
    for document, title in (
        ({"window_name": "first"}, "First Window"),
        ({"window_name": "Second window", "strict": True}, "Second window"),
    ):
        status, said = ask_json(desktop, "POST", "/setup/activate_window", **document)
        assert (status, said) == (200, "Window activated successfully")
        assert wait_active(desktop, by_title[title])
    for missing in (
        {"window_name": "first", "strict": True},
        {"window_name": "third"},
        {"window_name": "xterm", "by_class": True, "strict": True},
    ):
        for route in ("/setup/activate_window", "/setup/close_window"):
            assert ask_json(desktop, "POST", route, **missing)[0] == 404
    for wrong in ({"strict": True}, {"window_name": ""}, {"window_name": ["x"]}):
        assert ask_json(desktop, "POST", "/setup/close_window", **wrong)[0] == 400
    assert ask_json(desktop, "POST", "/setup/close_window", window_name="second")[0] == 200
    assert wait_titles(desktop, lambda found: len(found) == 1) == ["First Window"]
    document = {"window_name": "xterm.XTerm", "by_class": True, "strict": True}
    assert ask_json(desktop, "POST", "/setup/close_window", **document) == (200, "Window closed successfully.")
    assert wait_titles(desktop, lambda found: not found) == []


STATE = "{https://accessibility.ubuntu.example.org/ns/state}"
COMPONENT = "{https://accessibility.ubuntu.example.org/ns/component}"


def read_tree(desktop: Desktop) -> Any:
    status, document = ask_json(desktop, "GET", "/accessibility")
    assert status == 200, document
    return ElementTree.fromstring(document["AT"])


def test_accessibility_tree_is_osworlds(desktop: Desktop) -> None:
    """Roles are elements; states, places and texts are where OSWorld's agents look for them. The reader is the user."""
    desktop.execute("printf 'one <two> & \\033 three' > ~/tree.txt")
    ask_json(desktop, "POST", "/setup/open_file", path="/home/user/tree.txt", timeout_seconds=20)
    root = read_tree(desktop)
    assert root.tag == "desktop-frame" and "truncated" not in root.attrib
    (application,) = [x for x in root if x.get("name") == "mousepad"]
    assert application.tag == "application"
    (frame,) = [x for x in application.iter("frame") if "tree.txt" in x.get("name", "")]
    assert frame.get(f"{STATE}active") == "true" and frame.get(f"{STATE}showing") == "true"
    assert re.fullmatch(r"\(-?\d+, -?\d+\)", frame.get(f"{COMPONENT}screencoord", ""))
    assert re.fullmatch(r"\(\d+, \d+\)", frame.get(f"{COMPONENT}size", ""))
    texts = [x.text for x in application.iter("text") if x.text]
    # A control character has no place in XML.
    assert "one <two> &  three" in texts, texts
    desktop.execute("pkill mousepad")


def test_a_program_that_hangs_costs_its_part_of_the_tree(desktop: Desktop) -> None:
    for name in ("hang", "live"):
        command = ["mousepad", "--disable-server", f"/home/user/{name}.txt"]
        desktop.execute(f"echo x > ~/{name}.txt")
        desktop.ask("POST", "/setup/launch", {"command": command})
        wait_titles(desktop, lambda found, name=name: any(name in title for title in found))  # type: ignore[misc]
    desktop.execute(["pkill", "-STOP", "-f", "mousepad.*hang.txt"])
    began = time.monotonic()
    frames = {x.get("name") for x in read_tree(desktop).iter("frame")}
    assert time.monotonic() - began < 25
    assert any("live.txt" in name for name in frames) and not any("hang.txt" in name for name in frames)
    desktop.execute("pkill -CONT mousepad; pkill mousepad")


def test_bash_scripts(desktop: Desktop) -> None:
    """Output and errors in one, in their order; a folder of its own; a long script; what fails says so."""
    script = "echo out; echo err >&2; pwd; id -u; ls /proc/self/fd | wc -l; exit 3"
    status, reply = ask_json(desktop, "POST", "/run_bash_script", script=script, working_dir="/tmp")
    assert status == 200 and (reply["status"], reply["error"], reply["returncode"]) == ("error", "", 3)
    assert reply["output"].split()[:4] == ["out", "err", "/tmp", "1000"]
    long = "#!/bin/bash\n" + "# filler\n" * 50_000 + "cd; [[ $PWD == ~ ]] && echo done"
    status, reply = ask_json(desktop, "POST", "/run_bash_script", script=long)
    assert (status, reply["status"], reply["output"]) == (200, "success", "done\n")
    for document, expected in (
        ({"script": ""}, 400),
        ({"script": "pwd", "working_dir": "/none"}, 400),
        ({"script": "sleep 30", "timeout": 0.5}, 500),
    ):
        status, reply = ask_json(desktop, "POST", "/run_bash_script", **document)
        assert (status, reply["status"], reply["returncode"]) == (expected, "error", -1) and reply["output"]


def test_commands_inherit_nothing_of_the_servers(desktop: Desktop) -> None:
    """In particular not the socket by which the spawner tells how a job ended."""
    assert "socket" not in desktop.execute("ls -l /proc/self/fd")["output"]


def test_small_questions(desktop: Desktop) -> None:
    assert desktop.ask("GET", "/platform") == (200, b"Linux")
    assert json.loads(desktop.ask("GET", "/terminal")[1]) == {"output": None, "status": "success"}
    assert json.loads(desktop.ask("POST", "/desktop_path")[1]) == {"desktop_path": "/home/user/Desktop"}


# --- files ---


def upload(desktop: Desktop, path: str, data: bytes) -> tuple[int, bytes]:
    lines = [b"--b", b'Content-Disposition: form-data; name="file_path"', b"", path.encode(), b"--b"]
    lines += [b'Content-Disposition: form-data; name="file_data"; filename="f"', b"Content-Type: x/y", b"", data]
    body = b"\r\n".join([*lines, b"--b--", b""])
    return desktop.ask("POST", "/setup/upload", body, headers={"Content-Type": "multipart/form-data; boundary=b"})


def fetch(desktop: Desktop, path: str) -> tuple[int, bytes]:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    return desktop.ask("POST", "/file", f"file_path={path}".encode(), headers=form)


def test_files_go_in_and_come_out(desktop: Desktop) -> None:
    data = os.urandom(3 << 20) + b"\r\n--c\r\n"
    assert upload(desktop, "/home/user/new/folder/f.bin", data)[0] == 200
    assert fetch(desktop, "/home/user/new/folder/f.bin") == (200, data)
    assert fetch(desktop, "~/new/folder/f.bin") == (200, data)
    assert desktop.execute("stat -c '%u %a' new/folder/f.bin")["output"] == "1000 644\n"
    assert upload(desktop, "relative.txt", b"")[0] == 200
    assert fetch(desktop, "$HOME/relative.txt") == (200, b"")
    document = json.loads(desktop.ask("POST", "/list_directory", {"path": "/home/user/new"})[1])
    file = {"type": "file", "name": "f.bin"}
    folder = {"type": "directory", "name": "folder", "children": [file]}
    assert document == {"directory_tree": {"type": "directory", "name": "new", "children": [folder]}}
    assert desktop.ask("POST", "/list_directory", {"path": "/nowhere"})[0] == 400


def test_file_routes_act_as_the_user(desktop: Desktop) -> None:
    desktop.execute("mkfifo pipe; ln -sf /run/drums-guest/secret link")
    assert fetch(desktop, "/home/user/absent")[0] == 404
    assert fetch(desktop, "/home/user")[0] == 400
    assert fetch(desktop, "/home/user/pipe")[0] == 400
    assert fetch(desktop, "/dev/zero")[0] == 400
    for path in ("/run/drums-guest/secret", "/home/user/link", "/etc/shadow"):
        status, body = fetch(desktop, path)
        assert (status, b"Permission denied" in body) == (400, True), path
    for path in ("/etc/passwd", "/opt/drums/guest/server.py", "/home/user/link"):
        assert upload(desktop, path, b"x")[0] == 500, path


# --- the agent against the server ---


def test_agent_cannot_reach_the_servers_processes(desktop: Desktop) -> None:
    pids = desktop.server_pids()
    assert pids[0] != pids[1]
    for pid in (1, *pids):
        for command in (f"kill -9 {pid}", f"kill -0 {pid}", f"cat /proc/{pid}/environ", f"ls /proc/{pid}/fd"):
            assert desktop.execute(command)["returncode"] != 0, command
        code = f"import ctypes; print(ctypes.CDLL(None).ptrace(0x4206, {pid}, 0, 0))"
        assert json.loads(desktop.ask("POST", "/run_python", {"code": code})[1])["output"] == "-1\n"
    assert desktop.execute("ls /run/drums-guest; cat /run/drums-guest/secret")["output"] == ""
    assert desktop.execute("echo >> /opt/drums/guest/init.sh")["returncode"] != 0


def test_spawner_alone_keeps_three_capabilities(desktop: Desktop) -> None:
    server, spawner = desktop.server_pids()
    # KILL is 5, SETGID 6, SETUID 7.
    for pid, expected in ((server, 0), (spawner, 0b11100000)):
        lines = desktop.execute(f"cat /proc/{pid}/status")["output"].splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert [int(status[kind], 16) for kind in ("CapPrm", "CapEff", "CapAmb")] == [expected] * 3
        assert status["Uid"].split() == ["900"] * 4


def test_a_new_secret_counts_at_once(desktop: Desktop) -> None:
    other = "f" * 64
    file = desktop.root / "run/drums-guest/secret"
    file.write_text(other)
    try:
        assert desktop.ask("GET", "/health")[0] == 401
        assert desktop.ask("GET", "/health", secret=other)[0] == 200
    finally:
        file.write_text(SECRET)


def test_server_comes_back_after_its_spawner_died(desktop: Desktop) -> None:
    before = desktop.server_pids()
    kill_inside(desktop, before[1])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if desktop.ask("GET", "/health")[0] == 200 and desktop.server_pids() != before:
                break
        except OSError:
            time.sleep(0.05)
    assert set(desktop.server_pids()).isdisjoint(before)
    assert desktop.execute("id -u")["output"] == "1000\n"


def kill_inside(desktop: Desktop, pid: int) -> None:
    command = ["nsenter", "-t", str(desktop.pid), "-m", "-p", "kill", "-9", str(pid)]
    subprocess.run(command, check=True)


def test_agent_that_kills_everything_leaves_the_server(desktop: Desktop) -> None:
    """Last but one of the file: the session does not come back."""
    before = desktop.server_pids()
    desktop.ask("POST", "/execute", {"command": ["kill", "-9", "-1"]})
    desktop.ask("POST", "/run_python", {"code": "import os; os.kill(-1, 9)"})
    assert desktop.ask("GET", "/health")[0] == 200
    assert desktop.execute("id -u")["output"] == "1000\n"
    assert desktop.server_pids() == before
    started = time.monotonic()
    assert desktop.ask("GET", "/screenshot")[0] == 500
    assert time.monotonic() - started < 2


def test_a_false_display_is_survived(desktop: Desktop) -> None:
    """A display that takes connections and never answers costs one request its time, not the server its life."""
    code = (
        "import socket, os, time\n"
        "os.path.exists('/tmp/.X11-unix/X0') and os.unlink('/tmp/.X11-unix/X0')\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('/tmp/.X11-unix/X0'); s.listen(50); time.sleep(60)\n"
    )
    assert desktop.ask("POST", "/setup/launch", {"command": ["python3", "-c", code]})[0] == 200
    threads = [threading.Thread(target=desktop.ask, args=("GET", "/screenshot")) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert desktop.ask("GET", "/health")[0] == 200
    desktop.execute("pkill -9 -f X11-unix")
    for thread in threads:
        thread.join()


LYING_DISPLAY = """
import os, socket, struct, sys
lie = sys.argv[1]
os.path.exists("/tmp/.X11-unix/X0") and os.unlink("/tmp/.X11-unix/X0")
listener = socket.socket(socket.AF_UNIX)
listener.bind("/tmp/.X11-unix/X0")
os.chmod("/tmp/.X11-unix/X0", 0o777)
listener.listen(5)
open("/tmp/lies-" + lie, "w").close()
while True:
    client, _ = listener.accept()
    client.recv(12)
    client.sendall(struct.pack("<BxHHH", 1, 11, 0, 10) + bytes(40))
    while data := client.recv(65536):
        data = data.removeprefix(bytes((36, 0, 1, 0)))  # to serve nobody else has no reply
        if not data:
            continue
        width, height = {"size": (65535, 65535), "tall": (500, 65535)}.get(lie, (640, 480))
        # A shared-memory request is the one of the number that the extension was given here.
        if data[0] == 14:
            client.sendall(struct.pack("<BxHI8xHH12x", 1, 1, 0, width, height))
        elif data[0] == 98:
            client.sendall(struct.pack("<BxHIBB22x", 1, 2, 0, lie != "extension", 130))
        elif lie == "error":
            client.sendall(struct.pack("<BBH28x", 0, 10, 3))
        else:
            client.sendall(struct.pack("<BBHI4xI16x", 1, 8 if lie == "depth" else 24, 3, 0, 7))
"""


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ("size", "65535 by 65535 pixels"),
        ("tall", "500 by 65535 pixels"),
        ("extension", "no shared memory"),
        ("error", "refuses request 130: error 10"),
        ("depth", "depth 8"),
        ("bytes", "sent 7 bytes"),
    ],
)
def test_a_lying_display_is_told(desktop: Desktop, lie: str, told: str) -> None:
    """As the one before: its own words are an error of the request, whatever they are."""
    command = ["python3", "-c", LYING_DISPLAY, lie]
    assert desktop.ask("POST", "/setup/launch", {"command": command})[0] == 200
    desktop.execute(f"for i in $(seq 100); do [ -e /tmp/lies-{lie} ] && break; sleep 0.05; done")
    status, body = desktop.ask("GET", "/screenshot")
    assert status == 500 and told in body.decode()
    desktop.execute("pkill -9 -f lies-")
    assert desktop.ask("GET", "/health")[0] == 200


# --- parts that need no desktop ---


@pytest.fixture(scope="module")
def guest_path() -> Iterator[None]:
    sys.path.append(str(GUEST.parent))
    try:
        yield
    finally:
        sys.path.remove(str(GUEST.parent))


@pytest.fixture(scope="module")
def wire(guest_path: None) -> Any:
    return importlib.import_module("guest.wire")


@pytest.fixture(scope="module")
def signing(guest_path: None) -> Any:
    return importlib.import_module("guest.signing")


def test_both_sides_sign_the_same_bytes(signing: Any) -> None:
    nonce, digest = "0123456789abcdef" * 2, hashlib.sha256(b"body").hexdigest()
    request = (nonce, "POST", "/file?a=\xe9", "text/plain", digest)
    message = f"13:drums-request,32:{nonce},4:POST,9:/file?a=\xe9,10:text/plain,64:{digest},".encode("latin-1")
    signature = hmac.new(SECRET.encode(), message, "sha256").hexdigest()
    assert guest_client.request_signature(SECRET, *request) == signing.signature(SECRET.encode(), *request) == signature
    reply = (nonce, 200, "", digest)
    message = f"11:drums-reply,32:{nonce},3:200,0:,64:{digest},".encode()
    proof = hmac.new(SECRET.encode(), message, "sha256").hexdigest()
    assert guest_client.reply_proof(SECRET, *reply) == signing.proof(SECRET.encode(), *reply) == proof


def test_nonces_are_remembered_up_to_a_number(signing: Any, wire: Any) -> None:
    gate = signing.Gate(SECRET.encode)

    def request() -> Any:
        fields = {name.lower(): value for name, value in sign("GET", "/health").items()}
        return wire.Request("GET", "/health", fields)

    first = request()
    gate.admit(first)
    for _ in range(4095):
        gate.admit(request())
    with pytest.raises(wire.HttpError, match="before"):
        gate.admit(first)
    forged = request()
    forged.headers["x-drums-signature"] = "0" * 64
    with pytest.raises(wire.HttpError, match="not signed"):
        gate.admit(forged)
    with pytest.raises(wire.HttpError, match="before"):
        gate.admit(first)
    gate.admit(request())
    gate.admit(first)


def test_a_file_that_changes_while_it_is_sent_is_proven_as_sent(signing: Any, wire: Any) -> None:
    """The agent may shorten a file while the checker reads it; that costs the agent the file, not the check."""
    exchange = signing.Exchange(SECRET.encode(), "0" * 32, "")
    file = os.memfd_create("file")
    os.write(file, b"x" * (3 << 20))
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reply = wire.Reply(file=os.dup(file), content_type="application/octet-stream")
    os.lseek(file, 0, os.SEEK_SET)
    with ours, theirs:
        sender = threading.Thread(target=wire.send_reply, args=(theirs, reply, exchange.proof))
        sender.start()
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="GET", target="/", headers=[("Host", "desktop")]))
        client.send(h11.EndOfMessage())
        content = bytearray()
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                os.ftruncate(file, 1 << 20)
                client.receive_data(ours.recv(1 << 16))
            elif isinstance(event, h11.Data):
                content += event.data
        sender.join()
    os.close(file)
    assert len(content) < 3 << 20
    proof = guest_client.reply_proof(
        SECRET, "0" * 32, 200, "application/octet-stream", hashlib.sha256(content).hexdigest()
    )
    assert event.headers == [(b"x-drums-proof", proof.encode())]


# --- an impostor on the server's port ---

FORGED_DIGEST = hashlib.sha256(b"forged").hexdigest()
IMPOSTOR_PROOFS: dict[str, Callable[[str], str | None]] = {
    "none": lambda nonce: None,
    "empty": lambda nonce: "",
    "of another secret": lambda nonce: guest_client.reply_proof("0" * 64, nonce, 200, "text/plain", FORGED_DIGEST),
    "of another nonce": lambda nonce: guest_client.reply_proof(SECRET, "0" * 32, 200, "text/plain", FORGED_DIGEST),
    "of another status": lambda nonce: guest_client.reply_proof(SECRET, nonce, 404, "text/plain", FORGED_DIGEST),
    "of another type": lambda nonce: guest_client.reply_proof(SECRET, nonce, 200, "text/html", FORGED_DIGEST),
    "of another body": lambda nonce: guest_client.reply_proof(SECRET, nonce, 200, "text/plain", "0" * 64),
    "the request's signature": lambda nonce: guest_client.request_signature(
        SECRET, nonce, "GET", "/health", "", hashlib.sha256(b"").hexdigest()
    ),
}


async def with_impostor(
    monkeypatch: pytest.MonkeyPatch,
    prove: Callable[[str], str | None],
    work: Callable[[guest_client.GuestClient], Awaitable[None]],
) -> bytes:
    """Does work against a server that answers everything with a forged success; returns all that it was sent."""
    seen = bytearray()

    async def answer(stream: trio.SocketStream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += await stream.receive_some(1 << 16)
        seen.extend(head)
        nonce = re.search(rb"(?i)x-drums-nonce: (\w+)", head)
        assert nonce is not None
        proof = prove(nonce[1].decode())
        field = "" if proof is None else f"X-Drums-Proof: {proof}\r\n"
        reply = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 6\r\n{field}\r\nforged"
        await stream.send_all(reply.encode())
        await stream.aclose()

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    monkeypatch.setattr(guest_client, "PORT", listener.socket.getsockname()[1])
    netns = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, answer, [listener])
            await work(guest_client.GuestClient(netns, SECRET))
            nursery.cancel_scope.cancel()
    finally:
        os.close(netns)
    return bytes(seen)


@requires("root")
@pytest.mark.parametrize("kind", IMPOSTOR_PROOFS)
async def test_an_impostor_is_not_believed_and_learns_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: guest_client.GuestClient) -> None:
        for ask in (
            client.health(),
            client.call("POST", "/execute", {"command": "id"}),
            client.request("GET", "/file"),
        ):
            with pytest.raises(GuestError, match="does not know this desktop's secret"):
                await ask

    seen = await with_impostor(monkeypatch, IMPOSTOR_PROOFS[kind], work)
    assert SECRET.encode() not in seen


@requires("root")
async def test_the_impostor_of_these_tests_would_be_believed_with_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: guest_client.GuestClient) -> None:
        assert (await client.request("GET", "/file")).body == b"forged"

    await with_impostor(
        monkeypatch, lambda nonce: guest_client.reply_proof(SECRET, nonce, 200, "text/plain", FORGED_DIGEST), work
    )


@requires("root")
async def test_the_gateway_notes_an_impostor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker gets no forged byte, its own signature fields are not passed on, and the failure is noted."""
    failures: list[str] = []

    async def work(client: guest_client.GuestClient) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_guest, client.request, listening.detach(), failures)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(b"GET /file HTTP/1.1\r\nHost: x\r\nX-Drums-Nonce: worker\r\nX-A: b\r\n\r\n")
                reply = b"".join([part async for part in stream])
            nursery.cancel_scope.cancel()
        assert reply.startswith(b"HTTP/1.1 502") and b"forged" not in reply

    seen = await with_impostor(monkeypatch, lambda nonce: None, work)
    assert b"worker" not in seen and b"X-A" not in seen
    assert len(failures) == 1 and "does not know this desktop's secret" in failures[0]


async def test_the_gateway_passes_on_what_is_proven(desktop: Desktop) -> None:
    netns = os.open(f"/proc/{desktop.pid}/ns/net", os.O_RDONLY)
    failures: list[str] = []
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_guest, guest_client.GuestClient(netns, SECRET).request, listening.detach(), failures)
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(
                b"POST /file HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\n"
                b"Content-Length: 21\r\n\r\nfile_path=/etc/passwd"
            )
            reply = b"".join([part async for part in stream])
        nursery.cancel_scope.cancel()
    os.close(netns)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"x-drums" not in head.lower()
    assert body == (desktop.root / "etc/passwd").read_bytes()
    assert failures == []


def test_heads_are_read_strictly(wire: Any) -> None:
    head = b"POST /file?a=b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    request, start = wire.parse_head(bytearray(head))
    assert (request.method, request.path, request.headers["content-length"]) == ("POST", "/file", "3")
    assert head[start:] == b"abc"
    assert wire.parse_head(bytearray(head[:-10])) is None
    for wrong in (
        b"GET /\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET / HTTP/1.1\r\na\r\n\r\n",
        b"x" * (wire.MAX_HEAD + 1),
    ):
        with pytest.raises(wire.HttpError):
            wire.parse_head(bytearray(wrong))


def test_bodies_are_read_to_their_length(wire: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"cdef")
        request = wire.Request("POST", "/", {"content-length": "5"})
        wire.read_body(ours, request, b"ab")
        assert request.body == b"abcde"
        for headers in ({"content-length": "-1"}, {"content-length": "9" * 12}, {"transfer-encoding": "chunked"}):
            with pytest.raises(wire.HttpError):
                wire.read_body(ours, wire.Request("POST", "/", headers), b"")
        theirs.close()
        with pytest.raises(wire.HttpError, match="ended"):
            wire.read_body(ours, wire.Request("POST", "/", {"content-length": "9"}), b"ab")


def test_forms_of_both_kinds(wire: Any) -> None:
    request = wire.Request("POST", "/", {}, bytearray(b"file_path=%2Fa+b&x="))
    assert request.form() == {"file_path": b"/a b", "x": b""}
    request.body = bytearray("file_path=%2Fé%C3%A9%FF".encode())
    assert request.form() == {"file_path": "/éé".encode() + b"\xff"}
    body = b'--q\r\nContent-Disposition: form-data; name="d"; filename="n"\r\n\r\n\r\n--qq\r\n--q--\r\n'
    request = wire.Request("POST", "/", {"content-type": 'multipart/form-data; boundary="q"'}, bytearray(body))
    assert request.form() == {"d": b"\r\n--qq"}
    request.body = bytearray(body[:-9])
    with pytest.raises(wire.HttpError):
        request.form()


@pytest.fixture(scope="module")
def windows(guest_path: None) -> Any:
    return importlib.import_module("guest.windows")


@pytest.mark.parametrize(
    ("title", "name", "expected"),
    [
        ("~/a.txt - Mousepad", "a.txt", True),
        ("*a.txt", "a.txt", True),
        ("data.txt - Mousepad", "a.txt", False),
        ("my-a.txt", "a.txt", False),
        ("a.txt.bak - Mousepad", "a.txt", False),
        ("[berry.png] (imported)-1.0 (RGB color)", "berry.png", True),
        ("berry.xcf-1.0 (RGB color)", "berry.xcf", True),
        ("Calendar", "a", False),
        ("a - Mousepad", "a", True),
        ("Über uns.docx - Writer", "Über uns.docx", True),
        ("report.docx", "report", False),
        ("A+B (1).ods - Calc", "A+B (1).ods", True),
    ],
)
def test_titles_show_whole_names(windows: Any, title: str, name: str, expected: bool) -> None:
    assert windows.shows(title, name) is expected


def window(title: str, identity: str = "0x1", *classes: str) -> dict[str, Any]:
    return {"id": identity, "title": title, "class": list(classes)}


def test_which_window_shows_what_was_opened(windows: Any) -> None:
    """A short name counts in a new title only, a name without its ending too; programs go by title or class."""
    old = [window("a - Editor")]
    assert windows.opened(old, old, "a", "/home/user/a") is None
    assert windows.opened([*old, window("a - Editor", "0x2")], old, "a", "/home/user/a")["id"] == "0x2"
    assert windows.opened([window("/home/user/a - Editor")], old, "a", "/home/user/a") is not None
    kept = [window("report.pdf")]
    assert windows.opened(kept, kept, "report.pdf", "/home/user/report.pdf") == kept[0]
    assert windows.opened([window("report")], [window("report")], "report.pdf", "/r/report.pdf") is None
    assert windows.opened([window("report")], [], "report.pdf", "/r/report.pdf") is not None
    assert windows.opened([window("to")], [], "to.pdf", "/r/to.pdf") is None
    assert windows.opened([window("Untitled 1", "0x3", "mousepad", "Mousepad")], [], "mousepad") is not None
    assert windows.opened([window("Untitled 1 - Mousepad", "0x3")], [], "mousepad") is not None
    assert windows.opened([window("Untitled 1", "0x3")], [], "mousepad") is None
