"""Jobs that `test_worker.py` runs in the sandbox; standard library only."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from typing import Any


def _try(call: Any) -> str:
    try:
        return repr(call())
    except OSError as e:
        return type(e).__name__


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """What the sandbox is like from inside."""
    with open("/proc/self/status", encoding="ascii") as f:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
    with open("/proc/self/mounts", encoding="ascii") as f:
        mounts = [line.split() for line in f]

    def write(path: str) -> str:
        with open(path, "w", encoding="ascii") as f:
            return str(f.write("x"))

    def read(path: str) -> bytes:
        with open(path, "rb") as f:
            return f.read()

    listing = os.listdir(".")
    with open("script", "w", encoding="ascii") as f:
        f.write("#!/bin/sh\n")
    os.chmod("script", 0o755)
    return {
        "listing": listing,
        "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
        "status": status,
        "pids": sorted(int(x) for x in os.listdir("/proc") if x.isdigit()),
        "mounts": {x[1]: x[3].split(",") for x in mounts},
        "writable": [x[1] for x in mounts if "rw" in x[3].split(",") and x[2] != "proc"],
        "fds": sorted(int(x) for x in os.listdir("/proc/self/fd")),
        "environment": dict(os.environ),
        "others": [_try(lambda x=x: read(f"/proc/{x}/environ")) for x in ("1", "self")],
        "namespaces": {x: os.readlink(f"/proc/self/ns/{x}") for x in ("pid", "mnt", "net", "ipc", "uts")},
        "limits": {x: resource.getrlimit(getattr(resource, f"RLIMIT_{x}")) for x in ("CPU", "FSIZE", "CORE", "NPROC")},
        "links": sorted(x for _, x in socket.if_nameindex()),
        "host_file": _try(lambda: read(request["secret"])),
        "shadow": _try(lambda: read("/etc/shadow")),
        "write_root": _try(lambda: write("/x")),
        "write_usr": _try(lambda: write("/usr/x")),
        "write_job": _try(lambda: write(__file__)),
        "write_work": _try(lambda: write("x")),
        "execute_work": _try(lambda: subprocess.run(["./script"], check=False)),
        "internet": _try(lambda: socket.create_connection(("192.0.2.1", 80), 1)),
        "guest": _try(lambda: socket.create_connection(("127.0.0.1", 5000), 1).close()),
        "vsock": _try(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)),
        "sysfs": _try(lambda: os.listdir("/sys")),
        "kill_init": _try(lambda: os.kill(1, signal.SIGKILL)),
        "file": _try(lambda: read("/drums/files/given")),
        "unshare_user": subprocess.run(["/usr/bin/unshare", "-U", "true"], check=False, capture_output=True).returncode,
    }


def echo(request: dict[str, Any]) -> dict[str, Any]:
    """The request."""
    return request


def value(request: dict[str, Any]) -> Any:
    """Something that is no object, or no JSON."""
    return {"nan": float("nan"), "set": {1}, "string": "1.0"}.get(request["kind"]) or {"score": float("nan")}


def fail(request: dict[str, Any]) -> dict[str, Any]:
    """An exception."""
    print("seen before the end")
    raise ValueError("no such sheet")


def talk(request: dict[str, Any]) -> dict[str, Any]:
    """An exception that says a great deal."""
    raise ValueError("x" * (3 << 20))


def spin(request: dict[str, Any]) -> dict[str, Any]:
    """More CPU time than allowed, on all processors, and no word of it."""
    for _ in range(4):
        if os.fork() == 0:
            break
    while True:
        pass


def swarm(request: dict[str, Any]) -> dict[str, Any]:
    """More processes than allowed; the refusal is swallowed, as checkers do. They stay until the guest has answered."""
    try:
        for _ in range(1000):
            if os.fork() == 0:
                time.sleep(1000)
    except OSError:
        if request.get("asks"):
            ask(request)
    return {"score": 0.0}


def die(request: dict[str, Any]) -> dict[str, Any]:
    """A death of this process in one of several ways."""
    how = request["how"]
    if how == "exit":
        os._exit(7)
    if how == "abort":
        os.abort()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "file":
        with open("big", "wb") as f:
            f.truncate(1 << 40)
    return {}


def eat(request: dict[str, Any]) -> dict[str, Any]:
    """More memory than allowed."""
    blocks = []
    while True:
        blocks.append(bytearray(os.urandom(1 << 20)) * 8)


def fill(request: dict[str, Any]) -> dict[str, Any]:
    """A full scratch directory, whose error is swallowed as checkers do."""
    try:
        for i in range(10_000):
            with open(f"part{i}", "wb") as f:
                f.write(bytes(1 << 20))
    except OSError:
        pass
    return {"score": 0.0}


def hang(request: dict[str, Any]) -> dict[str, Any]:
    """No end, with children of its own that would outlive it."""
    for _ in range(3):
        subprocess.Popen([sys.executable, "-I", "-S", "-c", "import os, time; os.setsid(); time.sleep(1000)"])
    threading.Thread(target=time.sleep, args=(1000,)).start()
    print("hanging", flush=True)
    while True:
        time.sleep(1000)


def leave(request: dict[str, Any]) -> dict[str, Any]:
    """An answer, and a child that holds on to everything; not before the guest has answered."""
    if request.get("asks"):
        ask(request)
    subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"], close_fds=False)
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return {"left": True}


def flood(request: dict[str, Any]) -> dict[str, Any]:
    """Output without an end."""
    while True:
        os.write(1, b"x" * 65536)


def large(request: dict[str, Any]) -> dict[str, Any]:
    """An answer that is too large."""
    return {"text": "x" * (5 << 20)}


def forge(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes of its own on the reply's descriptor, the highest that is open."""
    os.write(int(sys.argv[1]), request["bytes"].encode())
    if request.get("exit"):
        os._exit(0)
    return {"score": 1.0}


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """What the guest says."""
    with socket.create_connection(("127.0.0.1", 5000), 15) as s:
        s.sendall(b"hello")
        return {"answer": s.recv(100).decode()}


def connect(request: dict[str, Any]) -> dict[str, Any]:
    """What each of several ports says."""

    def said(port: int) -> str:
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as s:
                s.sendall(b"hello")
                return s.recv(100).decode()
        except OSError as e:
            return type(e).__name__

    return {str(port): said(port) for port in request["ports"]}


def lose_a_child(request: dict[str, Any]) -> dict[str, Any]:
    """A child that takes more memory than allowed; its loss is swallowed, as getters do."""
    child = os.fork()
    if child == 0:
        eat(request)
    os.waitpid(child, 0)
    return {"score": 0.0}


def now(request: dict[str, Any]) -> dict[str, Any]:
    """When it was called."""
    return {"now": time.time()}


def in_two_parts(request: dict[str, Any]) -> Generator[None, None, dict[str, Any]]:
    """When each part ran, and what the desktop answers."""
    how = request.get("how")
    if how == "raises":
        raise ValueError("planted")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "once":
        return {"first": "and last"}
    first = time.time()
    yield
    if how == "thrice":
        yield
    return {"first": first, "second": time.time(), **ask(request)}
