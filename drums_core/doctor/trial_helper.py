"""The process behind `run_trial`: enters new namespaces, tries one thing, prints one JSON object and ends.

Started as `python -I -m ... NAME [ARG ...]`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from drums_core.sys import enter
from drums_core.sys.overlay import OPTIONS, Layer, mount_overlay

_FIRST_ID, _IDS = 1_000_000, 65_536
_MAP = f"0 {_FIRST_ID} {_IDS}"
_PTRACE_SEIZE, _PTRACE_INTERRUPT, _PTRACE_DETACH = 0x4206, 0x4207, 17
_AT_FDCWD = -100
_MAX_HANDLE = 128


def user_namespace() -> str:
    """Enter a user namespace and read its map back."""
    enter.new_userns(_MAP, _MAP)
    enter.set_ids(0, 0, [])
    # Bytes: a codec that is not loaded yet may lie where this user namespace's root cannot read.
    seen = b" ".join(Path("/proc/self/uid_map").read_bytes().split()).decode()
    if seen != _MAP or os.getuid() != 0:
        raise OSError(f"uid_map reads {seen!r}, uid {os.getuid()}")
    return f"uid_map {seen}"


def network_namespace() -> str:
    """Bring lo up in a new network namespace and send a byte over it."""
    enter.unshare(["net"])
    enter.link_up("lo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=5)
        accepted, _ = server.accept()
        with client, accepted:
            client.sendall(b"x")
            accepted.settimeout(5)
            if accepted.recv(1) != b"x":
                raise OSError("a byte sent over lo did not arrive")
    return "a byte sent over lo arrived"


def time_namespace() -> str:
    """Give a child a time namespace of its own."""
    before = os.readlink("/proc/self/ns/time")
    enter.unshare(["time"])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, os.readlink("/proc/self/ns/time").encode())
        os._exit(0)
    os.close(writer)
    inside = os.read(reader, 64).decode()
    os.waitpid(child, 0)
    if not inside or inside == before:
        raise OSError(f"a child is in {inside!r}, this process in {before!r}")
    return inside


def ptrace() -> str:
    """Seize, stop and let go of a child."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        for request in (_PTRACE_SEIZE, _PTRACE_INTERRUPT):
            enter.checked(enter.libc.ptrace(request, child, None, None), f"ptrace request {request:#x}")
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            raise OSError(f"a seized child did not stop: wait status {status:#x}")
        enter.checked(enter.libc.ptrace(_PTRACE_DETACH, child, None, None), "ptrace detach")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return "a child was seized and stopped"


def overlay(folder: str) -> str:
    """Mount a desktop's overlay in `folder`, and open files of both layers by their handles, as CRIU does."""
    # In a mount namespace of its own the mounts have no path on the host, and end with this process.
    enter.unshare(["mnt"])
    enter.mount(None, "/", None, ["rec", "private"])
    places = {name: Path(folder) / name for name in ("lower", "upper", "work", "merged")}
    for name, path in places.items():
        path.mkdir()
        if name in ("upper", "work"):
            os.chown(path, _FIRST_ID, _FIRST_ID)
    (places["lower"] / "below").write_text("below", encoding="ascii")
    idmap_fd = _idmap()
    mount_overlay(places["merged"], [Layer(places["lower"], shifted=False)], places["upper"], places["work"], idmap_fd)
    os.close(idmap_fd)
    options = _mount_options(places["merged"])
    missing = [f"{key}={value}" for key, value in OPTIONS.items() if f"{key}={value}" not in options]
    if missing:
        raise OSError(f"the kernel dropped {','.join(missing)}: {','.join(sorted(options))}")
    below, above = places["merged"] / "below", places["merged"] / "above"
    if (owner := below.stat().st_uid) != _FIRST_ID:
        raise OSError(f"a file of the id-mapped layer belongs to uid {owner} instead of {_FIRST_ID}")
    above.write_text("above", encoding="ascii")
    for path in (below, above):
        if (text := _read_by_handle(path, places["merged"])) != path.name:
            raise OSError(f"the handle of {path.name!r} opens a file that reads {text!r}")
    return f"{','.join(f'{key}={value}' for key, value in OPTIONS.items())}, file handles open"


def _idmap() -> int:
    """A descriptor of a user namespace with a desktop's map; its maker ends."""
    ready_r, ready_w = os.pipe()
    done_r, done_w = os.pipe()
    maker = os.fork()
    if maker == 0:
        os.close(done_w)
        os.close(ready_r)
        enter.new_userns(_MAP, _MAP)
        os.write(ready_w, b"1")
        os.read(done_r, 1)
        os._exit(0)
    os.close(ready_w)
    os.close(done_r)
    if os.read(ready_r, 1) != b"1":
        raise OSError("no user namespace for the id map")
    descriptor = os.open(f"/proc/{maker}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    os.close(done_w)
    os.waitpid(maker, 0)
    os.close(ready_r)
    return descriptor


def _mount_options(target: Path) -> set[str]:
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[4] == re.sub(r"[\\ \t\n]", lambda c: f"\\{ord(c[0]):03o}", str(target)):
            return set(rest.split()[2].split(","))
    raise OSError(f"{str(target)!r} is not in mountinfo")


def _read_by_handle(path: Path, mount_point: Path) -> str:
    """Open a file by its handle (name_to_handle_at(2)) and read it."""

    class Handle(ctypes.Structure):
        _fields_ = (("size", ctypes.c_uint), ("type", ctypes.c_int), ("bytes", ctypes.c_ubyte * _MAX_HANDLE))

    handle, mount_id = Handle(size=_MAX_HANDLE), ctypes.c_int()
    enter.checked(
        enter.libc.name_to_handle_at(_AT_FDCWD, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount_id), 0),
        f"name_to_handle_at {path.name}",
    )
    mount_fd = os.open(mount_point, os.O_RDONLY | os.O_DIRECTORY)
    try:
        descriptor = enter.checked(
            enter.libc.open_by_handle_at(mount_fd, ctypes.byref(handle), os.O_RDONLY), f"open_by_handle_at {path.name}"
        )
        with os.fdopen(descriptor, encoding="ascii") as file:
            return file.read()
    finally:
        os.close(mount_fd)


TRIALS: dict[str, Callable[..., str]] = {
    function.__name__: function for function in (user_namespace, network_namespace, time_namespace, ptrace, overlay)
}


def main() -> None:
    """Carry one trial out and print its answer."""
    try:
        answer = {"ok": True, "detail": TRIALS[sys.argv[1]](*sys.argv[2:])}
    except OSError as error:
        answer = {"ok": False, "detail": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
