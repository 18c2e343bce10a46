"""The token that callers present: made at the daemon's first start, in a file that only root can read."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from drums.errors import PrerequisiteError
from drums_core.durable import sync_directory

FILE = "token"
PREFIX = "drums_sk_"
_SHAPE = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{20,200}}")


def ensure_token(state_dir: Path) -> str:
    """The token of a state folder, made if there is none. Blocks.

    Raises:
        PrerequisiteError: the file holds none, or others can read it.
    """
    path = state_dir / FILE
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    # Written whole under another name: two daemons that start at once end up with one and the same.
    partial = state_dir / f".{FILE}.{secrets.token_hex(8)}"
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(f"{PREFIX}{secrets.token_urlsafe(32)}\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        os.unlink(partial)
    sync_directory(state_dir)
    return _read(path)


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(fd, encoding="ascii", errors="replace") as file:
        mode = os.fstat(fd).st_mode & 0o777
        text = file.read(300).strip()
    if mode & 0o077:
        raise PrerequisiteError(
            f"the token file {str(path)!r} has mode {mode:o}: others can read it",
            hint=f"chmod 600 {path}, or remove it to get a new token",
        )
    if not _SHAPE.fullmatch(text):
        raise PrerequisiteError(f"the token file {str(path)!r} holds no token", hint="remove it to get a new one")
    return text
