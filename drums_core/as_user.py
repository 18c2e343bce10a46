"""What the guest server of a desktop does as its user, uid 1000: actions, commands, and files."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from drums.errors import GuestError
from drums_core.abc import CommandResult
from drums_core.guest_client import GuestClient
from drums_core.model import Json

_ACTION_PREAMBLE = "import pyautogui; import time; pyautogui.FAILSAFE = False; "


async def act_as_user(guest: GuestClient, action: str) -> Mapping[str, Json]:
    """An action of the agent: pyautogui code, run to its end; what the guest server says of it."""
    document = (await guest.call("POST", "/run_python", {"code": _ACTION_PREAMBLE + action})).json()
    if not isinstance(document, dict):
        raise GuestError(f"the guest server answered an action with {type(document).__name__}, expected an object")
    return document


async def execute_as_user(
    guest: GuestClient, route: str, command: str | Sequence[str], *, shell: bool, timeout_s: float
) -> CommandResult:
    """A command by the guest server as uid 1000, to its end."""
    document = {
        "command": command if isinstance(command, str) else list(command),
        "shell": shell,
        "timeout": timeout_s,
    }
    reply = (await guest.call("POST", route, document, timeout_s=timeout_s + 10)).json()
    try:
        return CommandResult(int(reply["returncode"]), str(reply["output"]), str(reply["error"]))
    except (TypeError, KeyError, ValueError) as e:
        raise GuestError(f"the guest server answered {route} with {str(reply)[:200]}") from e


async def read_as_user(guest: GuestClient, path: str) -> bytes:
    """A regular file, read by the guest server as uid 1000; raises GuestError when it cannot be read."""
    return await _form(guest, "/file", file_path=path.encode(errors="surrogateescape"))


async def upload_as_user(guest: GuestClient, path: str, content: bytes) -> None:
    """Write a file by the guest server as uid 1000; raises GuestError when it cannot be written."""
    await _form(guest, "/setup/upload", file_path=path.encode(errors="surrogateescape"), file_data=content)


async def _form(guest: GuestClient, route: str, **fields: bytes) -> bytes:
    boundary = f"drums-{uuid.uuid4().hex}"
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value + b"\r\n"
        for name, value in fields.items()
    ]
    form = b"".join([*parts, f"--{boundary}--\r\n".encode()])
    reply = await guest.request("POST", route, form, [("Content-Type", f"multipart/form-data; boundary={boundary}")])
    if reply.status != 200:
        raise GuestError(
            f"the guest server answered POST {route} with {reply.status}: {reply.body[:300]!r}",
            guest_status=reply.status,
        )
    return reply.body
