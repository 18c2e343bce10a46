"""Trusted provisioning, the part that runs inside a desktop: one set-up step with a `sudo` of its own.

The host enters the desktop's namespaces as their root and runs this file's source with the image's interpreter
(`python3 -I -c SOURCE`, the request as JSON on standard input, the reply as JSON on standard output). The step
runs as uid 1000; `sudo`, first on its PATH for its duration, hands its operand and streams over a socket to this
process, which runs it as root with HOME and the working folder kept. Only descendants of the step are served:
the caller's pid comes from the kernel (SO_PEERCRED, unix(7)) and is followed up to the step.

Stand-alone on purpose: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any

USER_UID = 1000
OUTPUT_LIMIT_BYTES = 8 << 20
GRACE_S = 0.2
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_SET_DUMPABLE = 38, 24, 4

SHIM = """#!/usr/bin/python3 -I
import array, json, os, socket, struct, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
s.connect({path!r})
body = json.dumps({{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}).encode()
fds = array.array("i", [0, 1, 2])
s.sendmsg([struct.pack("I", len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
s.sendall(body)
code = s.recv(4, socket.MSG_WAITALL)
sys.exit(struct.unpack("I", code)[0] if len(code) == 4 else 1)
"""
_CHOOSES_CODE = ("LD_", "PYTHON", "PERL", "RUBY", "BASH_", "ENV", "GCONV_PATH", "GIO_", "GTK_", "QT_", "NODE_")
_SHORT_WITH_VALUE = "CDghpRrTtUu"
_LONG_WITH_VALUE = {
    "--chdir",
    "--chroot",
    "--close-from",
    "--command-timeout",
    "--group",
    "--host",
    "--other-user",
    "--prompt",
    "--role",
    "--type",
    "--user",
}


def parse_sudo(argv: list[str]) -> tuple[str, bool, dict[str, str], list[str]]:
    """(user, whether -S reads the password from standard input, assignments, operand) of sudo's arguments (sudo(8))."""
    user, from_stdin, assignments, shell = "root", False, {}, False
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest.pop(0)
        if option == "--":
            break
        if option.startswith("--"):
            name, given, value = option.partition("=")
            if name in _LONG_WITH_VALUE and not given:
                value = rest.pop(0) if rest else ""
            user = value if name == "--user" else user
            from_stdin = from_stdin or name == "--stdin"
            shell = shell or name in ("--login", "--shell")
            continue
        for place, letter in enumerate(option[1:], 2):
            if letter in _SHORT_WITH_VALUE:  # the rest of the cluster is its value, or the next word
                value = option[place:] or (rest.pop(0) if rest else "")
                user = value if letter == "u" else user
                break
            from_stdin = from_stdin or letter == "S"
            shell = shell or letter in "is"
    while rest and "=" in rest[0] and not rest[0].startswith(("/", "=")):
        key, _, value = rest.pop(0).partition("=")
        assignments[key] = value
    return user, from_stdin, assignments, rest or (["/bin/sh"] if shell else [])


def become(uid: int, groups: list[int]) -> None:
    """Drop from root to a user for good: no capabilities, no way back."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups(groups)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process is `ancestor` or a descendant of it."""
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            with open(f"/proc/{pid}/stat", "rb") as f:
                pid = int(f.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


def run_operand(request: dict[str, Any], fds: list[int]) -> int:
    """Fork and run sudo's operand; the child's pid."""
    user, from_stdin, assignments, operand = parse_sudo([str(x) for x in request["argv"]])
    child = os.fork()
    if child:
        return child
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 4096)
        if from_stdin:
            while os.read(0, 1) not in (b"\n", b""):  # the password's line is sudo's, the rest the operand's
                pass
        # HOME is kept, but nothing that lets what lies in it, or the caller, choose code for root to run.
        kept = {str(k): str(v) for k, v in request["env"].items() if not str(k).startswith(_CHOOSES_CODE)}
        env = {**kept, **assignments, "PYTHONNOUSERSITE": "1"}
        os.chdir(request["cwd"])
        if user not in ("root", "#0"):
            become(USER_UID, [USER_UID])
        if not operand:
            os._exit(0)  # `sudo -v` and the like: nothing to run
        os.execvpe(operand[0], operand, env)
    except OSError as e:
        os.write(2, f"sudo: {e}\n".encode())
    os._exit(127)


def receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One request of the shim with its three streams."""
    fds = list(socket.recv_fds(connection, 4, 3))
    length = struct.unpack("I", fds[0])[0]
    if length > 1 << 20:
        raise ValueError("too long a request")
    body = b""
    while len(body) < length:
        part = connection.recv(length - len(body))
        if not part:
            raise ValueError("the request breaks off")
        body += part
    return json.loads(body), fds[1]


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run the step and serve its sudo until it ends."""
    folder = tempfile.mkdtemp(prefix="drums-step-", dir="/run")
    try:
        os.chmod(folder, 0o755)
        path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            os.chmod(path, 0o666)
            listener.listen(16)
            shim = os.path.join(folder, "sudo")
            with open(shim, "w", encoding="utf-8") as f:
                f.write(SHIM.format(path=path))
            os.chmod(shim, 0o755)
            return _run_step(request, folder, listener)
    finally:
        shutil.rmtree(folder)


def _run_step(request: dict[str, Any], folder: str, listener: socket.socket) -> dict[str, Any]:
    out_r, out_w = os.pipe()
    err_r, err_w = os.pipe()
    step = os.fork()
    if step == 0:
        try:
            os.setsid()
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(out_w, 1)
            os.dup2(err_w, 2)
            os.closerange(3, 4096)
            env = dict(request["env"])
            env["PATH"] = folder + ":" + env["PATH"]
            os.chdir(env["HOME"])
            become(USER_UID, [USER_UID])
            argv = ["/bin/sh", "-c", request["command"]] if request["shell"] else list(request["command"])
            os.execvpe(argv[0], argv, env)
        except BaseException as e:  # noqa: BLE001 - a forked child: it must end here, never go on
            os.write(2, f"{e}\n".encode())
        os._exit(127)
    os.close(out_w)
    os.close(err_w)
    streams: dict[int, bytearray] = {out_r: bytearray(), err_r: bytearray()}
    operands: dict[int, socket.socket] = {}
    deadline = time.monotonic() + float(request["timeout_s"])
    status: int | None = None
    ended_at = 0.0
    open_fds = {out_r, err_r}
    while open_fds or status is None:
        now = time.monotonic()
        if status is None and now > deadline:
            os.killpg(step, signal.SIGKILL)
            for pid in operands:
                os.kill(pid, signal.SIGKILL)
        if status is not None and now > ended_at + GRACE_S:
            break  # a program that the step left behind holds the pipe
        ready, _, _ = select.select([listener.fileno(), *open_fds], [], [], 0.02)
        for fd in ready:
            if fd == listener.fileno():
                _accept(listener, step, operands)
                continue
            data = os.read(fd, 1 << 16)
            if not data:
                open_fds.discard(fd)
            elif len(streams[fd]) < OUTPUT_LIMIT_BYTES:
                streams[fd] += data
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == step:
                status, ended_at = os.waitstatus_to_exitcode(code), time.monotonic()
            elif pid in operands:
                exit_code = os.waitstatus_to_exitcode(code)
                # The caller may be gone: then nobody wants the code.
                with operands.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
                    connection.sendall(struct.pack("I", exit_code if exit_code >= 0 else 128 - exit_code))
    return {
        "returncode": status,
        "output": bytes(streams[out_r]).decode(errors="replace"),
        "error": bytes(streams[err_r]).decode(errors="replace"),
        "timed_out": time.monotonic() > deadline,
    }


def _accept(listener: socket.socket, step: int, operands: dict[int, socket.socket]) -> None:
    connection, _ = listener.accept()
    pid = struct.unpack("iii", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    connection.settimeout(5.0)
    try:
        if not descends(pid, step):
            raise ValueError("not called by the step")
        request, fds = receive_request(connection)
        if len(fds) != 3:
            raise ValueError("not three streams")
    except (OSError, ValueError, KeyError):
        connection.close()
        return
    operands[run_operand(request, fds)] = connection
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    json.dump(serve(json.load(sys.stdin)), sys.stdout)
