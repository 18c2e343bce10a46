"""Entering a desktop from the host as root of its namespaces: trusted provisioning.

The agent can never reach this path: it begins on the host. Everything started here gets the desktop's seccomp
filter and a session of its own, so that what a step leaves behind becomes init's child and is dumped with the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs
import trio

from drums.errors import GuestError
from drums_core.model import Json
from drums_core.sys import sudo_server
from drums_core.sys.cgroups import Cgroup
from drums_core.sys.helper import Plan, run_helper
from drums_core.sys.inside import open_namespaces
from drums_core.sys.seccomp import desktop_filter

_SOURCE = Path(sudo_server.__file__).read_text(encoding="utf-8")
USER_ENV = {
    "HOME": "/home/user",
    "USER": "user",
    "LOGNAME": "user",
    "SHELL": "/bin/bash",
    "DISPLAY": ":0",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/games",
    "XDG_RUNTIME_DIR": "/run/user/1000",
    "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/1000/bus",
}


@attrs.frozen
class Provisioner:
    """Root's entrance to one desktop."""

    pid1: int
    cgroup: Cgroup

    async def run_as_root(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None, timeout_s: float = 120.0
    ) -> tuple[int, bytes]:
        """Run a program inside as root of the desktop's namespaces; its exit code and output.

        Raises:
            GuestError: the desktop could not be entered, or the program took too long (it is killed).
        """
        with ExitStack() as stack:
            try:
                fds = stack.enter_context(open_namespaces(self.pid1))
            except OSError as e:
                raise GuestError(f"the desktop's namespaces cannot be entered: {e}") from e
            plan: Plan = [
                ["cgroups", [str(p) for p in self.cgroup.paths]],
                *[["setns", fd, kind] for fd, kind in fds],
                ["ids", 0, 0, []],
                ["chdir", "/"],
                ["fork", None, True],
                ["die_with_parent", 9],  # a cancelled helper takes the program along
                ["close_from", 3, []],
                ["umask", 0o022],
                ["seccomp", desktop_filter().hex()],
                ["exec", list(argv), dict(env or USER_ENV | {"HOME": "/root", "USER": "root", "LOGNAME": "root"})],
            ]
            with trio.move_on_after(timeout_s) as scope:
                return await run_helper(plan, pass_fds=[fd for fd, _ in fds], check=False, stdin=stdin)
            assert scope.cancelled_caught
            raise GuestError(f"{argv[0]!r} inside the desktop did not end within {timeout_s:g} s")

    async def run_step(self, command: str | Sequence[str], *, shell: bool, timeout_s: float) -> Mapping[str, Json]:
        """Run a set-up command as the user with a `sudo` for its duration; `returncode`, `output`, `error`.

        Only in a desktop in which no agent has acted: what an agent left (a file that the user's Python loads, a
        process that traces the step) would get root through it.
        """
        request = {
            "command": command if isinstance(command, str) else list(command),
            "shell": shell,
            "env": USER_ENV,
            "timeout_s": timeout_s,
        }
        code, output = await self.run_as_root(
            ["/usr/bin/python3", "-I", "-c", _SOURCE], stdin=json.dumps(request).encode(), timeout_s=timeout_s + 10
        )
        try:
            reply = json.loads(output)
        except ValueError:
            reply = None
        if code or not isinstance(reply, dict):
            raise GuestError(f"provisioning ended with {code}: {output[-500:].decode(errors='replace')}")
        return reply
