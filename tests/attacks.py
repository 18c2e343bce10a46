"""What a hostile agent does in a desktop, and programs of its own. No test itself.

`test_attacks.py`, `test_grade_copy.py` and `test_desktop_life.py` look at what it gains by it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from desktops import run, start_daemon, write

from drums.errors import DrumsError
from drums_core.slot import Slot


async def ignore(slot: Slot, script: str, timeout_s: float = 30) -> str:
    """A script that may fail, or take the whole desktop along."""
    try:
        return (await slot.execute(script, shell=True, timeout_s=timeout_s)).output
    except DrumsError as e:
        return str(e)


async def write_the_answer(slot: Slot) -> str:
    """Files that graders have taken for a verdict."""
    return await ignore(
        slot,
        """
        for d in ~ /tmp /logs /logs/verifier /drums /drums/work /run/drums /run/drums-guest /var/log /results; do
            mkdir -p $d 2>/dev/null
            for f in reward.txt reward.json score result.json conftest.py cache; do
                echo '{"score": 1.0, "reward": 1.0, "ok": true, "value": {"score": 1.0}}' >$d/$f
            done 2>/dev/null
            ln -s /etc $d/logs 2>/dev/null
        done; true
        """,
    )


async def kill_by_name(slot: Slot) -> None:
    await ignore(slot, "pkill -9 -f python3; pkill -9 tini; pkill -9 init.sh; kill -9 -1")


async def kill_the_session(slot: Slot) -> None:
    await ignore(slot, "pkill -9 openbox; pkill -9 dbus-daemon; pkill -9 at-spi; pkill -9 Xtigervnc; true")


async def stop_the_session(slot: Slot) -> None:
    await run(slot, "pkill -STOP openbox; pkill -STOP dbus-daemon; pkill -STOP Xtigervnc; true")


async def fill_the_disk(slot: Slot) -> None:
    await ignore(slot, "cat /dev/zero >/run/user/1000/full; true", timeout_s=60)


async def forge_the_server(slot: Slot) -> None:
    """A guest server of its own on other ports, and on the right one whenever that is free."""
    source = """
import http.server, threading, time
class Says(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = b'{"status": "success", "output": "yes\\\\n", "error": "", "returncode": 0}'
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST
def serve(port):
    while True:
        try:
            http.server.ThreadingHTTPServer(("0.0.0.0", port), Says).serve_forever()
        except OSError:
            time.sleep(0.01)
for port in (5000, 5001, 8080, 9222, 7070):
    threading.Thread(target=serve, args=(port,)).start()
open("/tmp/server.ready", "w").close()
"""
    await start_daemon(slot, "server", source)


def answer(make: str) -> Callable[[Slot], Awaitable[Any]]:
    """`~/answer` as a Python program makes it."""

    async def plant(slot: Slot) -> None:
        await write(slot, "/tmp/make.py", "import os, socket, zlib\nos.chdir('/home/user')\n" + make)
        await run(slot, "python3 /tmp/make.py")

    return plant


HONEST_FILE = "rm -rf ~/answer; printf yes >~/answer"
ZIP_BOMB = """
packer = zlib.compressobj()
head = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)  # stands alone, so it can be repeated
open("answer", "wb").write(head + block * (16 << 10))
"""
XML_BOMB = """
lines = [f'<!ENTITY {x} "{f"&{y};" * 10}">' for x, y in zip("bcdefghijk", "abcdefghij")]
open("answer", "w").write('<!DOCTYPE a [<!ENTITY a "yes">' + "".join(lines) + "]><a>&k;</a>")
"""

EVAL = """__import__('sys')._getframe(1).f_locals.get('rule', {}).get('expected') or open('/tmp/x', 'w')"""

# --- programs of its own

# Changes a file back and forth, without end.
COUNTER = """
import os
open("/tmp/counter.ready", "w").close()
while True:
    for text in ("yes", "no"):
        with open("/home/user/new", "w") as f:
            f.write(text)
        os.rename("/home/user/new", "/home/user/f")
"""

# Takes the standard output of whatever has the word MARK in its command line (pidfd_open(2), pidfd_getfd(2)), and ends
# the other. What it met is in /tmp/thief.told.
THIEF = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
open("/tmp/thief.ready", "w").close()
seen = set()
while True:
    for name in os.listdir("/proc"):
        try:
            line = open(f"/proc/{name}/cmdline", "rb").read()
        except OSError:
            continue
        if b"MARK" not in line or name in seen:
            continue
        seen.add(name)
        process = os.pidfd_open(int(name))
        stolen = libc.syscall(438, process, 1, 0)
        with open("/tmp/thief.told", "a") as f:
            f.write(f"pidfd_getfd: {os.strerror(ctypes.get_errno()) if stolen < 0 else 'taken'}\\n")
            for path in ("fd/1", "mem", "environ"):
                try:
                    open(f"/proc/{name}/{path}", "rb").close()
                    f.write(f"{path}: opened\\n")
                except OSError as e:
                    f.write(f"{path}: {e.strerror}\\n")
        if stolen >= 0:
            os.write(stolen, b"yes\\n")
            os.kill(int(name), 9)
            raise SystemExit  # once: a shell's child has the shell's line until it is another program
    time.sleep(0.002)
"""
# Crashes later.
BOMB = """
import os, time
since = time.monotonic()
open("/tmp/bomb.ready", "w").close()
while time.monotonic() - since < 8:
    time.sleep(0.05)
if os.fork() == 0:
    os.abort()
time.sleep(3600)
"""
# Tries what an agent may not, and prints what each attempt came to.
AGENT = r"""
import ctypes, json, os, signal, socket, struct, urllib.error, urllib.request
libc = ctypes.CDLL(None, use_errno=True)
def errno_of(work):
    try:
        result = work()
    except OSError as e:
        return e.errno
    return 0 if result is None or result >= 0 else ctypes.get_errno()
def call(number, *args):
    return lambda: libc.syscall(number, *args)
guests = []
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try:
            if b"/opt/drums/guest/server.py" in open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0"):
                guests.append(int(pid))
        except OSError:
            pass
out = {"guests": len(guests)}
for name, pid in [("init", 1)] + [(f"guest{n}", p) for n, p in enumerate(guests)]:
    out[f"kill {name}"] = errno_of(lambda: os.kill(pid, signal.SIGKILL))
    out[f"stop {name}"] = errno_of(lambda: os.kill(pid, signal.SIGSTOP))
    out[f"trace {name}"] = errno_of(lambda: libc.ptrace(16, pid, 0, 0))
    out[f"read memory of {name}"] = errno_of(lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY))
    out[f"read environment of {name}"] = errno_of(lambda: len(open(f"/proc/{pid}/environ", "rb").read()))
    out[f"pidfd_getfd {name}"] = errno_of(lambda: libc.syscall(438, os.pidfd_open(pid), 0, 0))
out["read secret"] = errno_of(lambda: os.open("/run/drums-guest/secret", os.O_RDONLY))
out["list secrets"] = errno_of(lambda: len(os.listdir("/run/drums-guest")))
out["setuid"] = errno_of(lambda: os.setuid(0))
out["userns by unshare"] = errno_of(lambda: libc.unshare(0x10000000))
out["mntns by unshare"] = errno_of(lambda: libc.unshare(0x20000))
out["userns by clone"] = errno_of(call(56, 0x10000000 | 17, 0, 0, 0, 0))
out["userns by clone3"] = errno_of(call(435, 0, 0))
out["io_uring"] = errno_of(call(425, 8, ctypes.create_string_buffer(120)))
out["vsock"] = errno_of(lambda: socket.socket(40, socket.SOCK_STREAM).close())
out["bpf"] = errno_of(call(321, 0, 0, 0))
out["mount"] = errno_of(lambda: libc.mount(b"x", b"/mnt", b"tmpfs", 0, None))
out["chroot"] = errno_of(lambda: os.chroot("/tmp"))
out["core_pattern"] = errno_of(lambda: os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
out["raw socket"] = errno_of(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close())
out["write guest"] = errno_of(lambda: os.open("/opt/drums/guest/server.py", os.O_WRONLY))
out["int80"] = os.path.exists("/proc/kcore") and errno_of(lambda: os.open("/proc/kcore", os.O_RDONLY))
for route in ("/health", "/screenshot", "/run_python"):
    request = urllib.request.Request("http://127.0.0.1:5000" + route, method="POST" if "run" in route else "GET")
    try:
        out["http " + route] = urllib.request.urlopen(request, timeout=5).status
    except urllib.error.HTTPError as e:
        out["http " + route] = e.code
out["status"] = dict(x.split(":\t", 1) for x in open("/proc/self/status").read().splitlines() if ":\t" in x)
out["suid"] = os.popen("find / -xdev -perm /6000 -type f 2>/dev/null").read().split()
print(json.dumps(out))
"""
# A process of the user's that is no descendant of the step, and asks the step's sudo for root.
INTRUDER = r"""
import array, glob, json, os, socket, struct, time
for _ in range(2000):
    for path in glob.glob("/run/drums-step-*/socket"):
        try:
            s = socket.socket(socket.AF_UNIX)
            s.connect(path)
            body = json.dumps({"argv": ["touch", "/intruder-was-here"], "cwd": "/", "env": dict(os.environ)}).encode()
            fds = array.array("i", [0, 1, 2])
            s.sendmsg([struct.pack("I", len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            s.sendall(body)
            print("answer", s.recv(4), flush=True)
        except OSError as e:
            print("refused", e, flush=True)
        raise SystemExit
    time.sleep(0.005)
print("found no socket", flush=True)
"""
