"""The examiner: a guest server of the checker's own in a desktop whose processes are frozen.

Its program is `sys/examiner_main.py`; docs/adr/0005-grade-a-frozen-copy.md says why there is one. It is entered from
the host, sits in a cgroup of its own, and listens on an address that only the host's network namespace has.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import trio

from drums.errors import CheckerError, GuestError
from drums_core.desktop import Desktop
from drums_core.guest_client import GuestClient
from drums_core.leftovers import temporary_cgroup
from drums_core.model import Limits
from drums_core.sys.helper import Plan, start_helper
from drums_core.sys.inside import open_namespaces
from drums_core.sys.seccomp import desktop_filter

# Not imported: it needs the guest's modules.
_SOURCE = Path(__file__).with_name("sys").joinpath("examiner_main.py").read_text(encoding="utf-8")
_CAPABILITIES = "-all,+setuid,+setgid,+kill,+wake_alarm"
PIDS = 512
START_LIMIT_S = 30.0
END_LIMIT_S = 10.0
_LOG = "examiner.log"


@asynccontextmanager
async def open_examiner(desktop: Desktop) -> AsyncIterator[GuestClient]:
    """A guest server in a desktop, which runs whether or not the desktop's own processes do.

    Args:
        desktop: a restored desktop; it may be frozen and thawed meanwhile.

    Raises:
        CheckerError: it could not be started.

    At the end of the block it is gone, with everything that it started.
    """
    assert desktop.guest is not None
    limits = Limits(
        cpus=desktop.limits.cpus,
        memory_bytes=desktop.limits.memory_bytes,
        swap_bytes=desktop.limits.swap_bytes,
        pids=PIDS,
    )
    async with temporary_cgroup(limits) as cgroup:
        # An abstract address, chosen by the kernel (unix(7), autobind), in the host's network namespace: whoever
        # accepts there, nothing in the desktop can connect to it.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(b"")
            listener.listen(64)
            client = GuestClient(desktop.guest.netns_fd, desktop.guest.secret, listener.getsockname())
            process = await _start(desktop, cgroup.paths, listener.fileno())
        try:
            try:
                with trio.fail_after(START_LIMIT_S):
                    await client.call("GET", "/health", timeout_s=START_LIMIT_S)
            except (GuestError, trio.TooSlowError) as e:
                told = (desktop.folder / "log" / _LOG).read_bytes()[-500:].decode(errors="replace").strip()
                raise CheckerError(f"the checker could not enter the copy: {told or e}") from e
            yield client
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + END_LIMIT_S):
                assert process.stdin is not None
                await process.stdin.aclose()
                process.kill()  # by itself: it may not have come to its cgroup yet
                cgroup.kill()
                while cgroup.pids():
                    cgroup.kill()
                    await trio.sleep(0.002)
                await process.wait()


async def _start(desktop: Desktop, cgroup_paths: Sequence[Path], listener: int) -> trio.Process:
    with ExitStack() as stack:
        try:
            fds = stack.enter_context(open_namespaces(desktop.pid1))
        except OSError as e:
            raise CheckerError(f"the copy's namespaces cannot be entered: {e}") from e
        # As the guest server is started (guest/init.sh), and with the capability that the agent's processes lack.
        argv = ["/usr/bin/setpriv", "--reuid", "900", "--regid", "900", "--clear-groups", "--no-new-privs"]
        argv += [f"--{kind}={_CAPABILITIES}" for kind in ("bounding-set", "inh-caps", "ambient-caps")]
        argv += ["/usr/bin/python3", "-I", "-c", _SOURCE, str(listener)]
        plan: Plan = [
            ["cgroups", [str(p) for p in cgroup_paths]],
            *[["setns", fd, kind] for fd, kind in fds],
            ["ids", 0, 0, []],
            ["chdir", "/"],
            ["fork", None, True],
            ["close_from", 3, [listener]],
            ["umask", 0o022],
            ["seccomp", desktop_filter().hex()],
            ["exec", argv, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}],
        ]
        with (desktop.folder / "log" / _LOG).open("wb") as log:
            return await start_helper(
                plan,
                pass_fds=[listener, *[fd for fd, _ in fds]],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
