"""The user namespace that id-maps a desktop's read-only layers: root inside is nobody on the host."""

from __future__ import annotations

import subprocess

import trio

from drums_core.sys.helper import start_helper
from drums_core.sys.inside import open_namespace

FIRST_ID = 1_000_000
ID_COUNT = 65_536
ID_MAP = f"0 {FIRST_ID} {ID_COUNT}"


async def open_idmap() -> int:
    """A descriptor of a user namespace with the desktops' maps; the process that made it is gone.

    Raises:
        OSError: user namespaces cannot be had here.
    """
    helper = await start_helper(
        [["userns", ID_MAP, ID_MAP], ["exec", ["/bin/cat"], {}]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert helper.stdin and helper.stdout and helper.stderr
    try:
        await helper.stdin.send_all(b"?")
        if await helper.stdout.receive_some(1) != b"?":
            text = (await helper.stderr.receive_some(1000)).decode(errors="replace")
            raise OSError(f"no user namespace: {text.strip()}")
        return open_namespace(helper.pid, "user")
    finally:
        with trio.CancelScope(shield=True):
            for stream in (helper.stdin, helper.stdout, helper.stderr):
                await stream.aclose()
            await helper.wait()  # cat ends at its end of file
