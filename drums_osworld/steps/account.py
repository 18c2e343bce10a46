"""The operator's accounts: the files that the steps `googledrive` and `login` look for passwords and tokens in.

A task names a file (`settings_file`); it is looked for in the folder of the host's setting `accounts`, which is laid
out as a checkout of OSWorld. What is read there goes to the service, and to the desktop's browser where that signs in,
and nowhere else: no error, note or record has it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from typing import Any

from drums.errors import ConfigError, SetupFailed
from drums_core.abc import Accounts
from drums_core.task_files.mirror import open_nonblocking

LARGEST_BYTES = 1 << 20
SETTING = "accounts"
_HIDDEN = "[secret]"


def check_settings_file(name: str, step_type: str) -> None:
    """Refuse a path that is none inside a folder.

    Raises:
        ConfigError: it is empty, absolute, or has a part `..`.
    """
    if not name.strip() or "\0" in name or name.startswith("/") or ".." in name.split("/"):
        raise ConfigError(
            f"the parameters of a {step_type!r} step are wrong: settings_file is {name!r}, "
            "which is no path inside the operator's folder",
            path="$.parameters.settings_file",
        )


def read_account_file(accounts: Accounts, name: str) -> bytes:
    """The content of a file of the operator's. Blocks.

    Args:
        accounts: where it is looked for.
        name: its path there. Links are followed as long as they stay inside, since a mounted secret is one.

    Raises:
        SetupFailed: there is no such folder or file, it lies outside, or it cannot be read.
    """
    if accounts.folder is None:
        raise failure(
            name, "this host has no folder with accounts", "set accounts or DRUMS_ACCOUNTS to one that has it"
        )
    top = os.path.realpath(accounts.folder)
    path = os.path.realpath(os.path.join(top, name))
    if os.path.commonpath((top, path)) != top:
        raise failure(name, f"it is outside of {str(accounts.folder)!r}", "put the file itself there")
    try:
        with open(path, "rb", opener=open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise failure(name, f"it is no regular file in {str(accounts.folder)!r}")
            content = file.read(LARGEST_BYTES + 1)
    except OSError as e:
        raise failure(
            name, f"it cannot be read in {str(accounts.folder)!r}: {e.strerror}", f"put it there, or set {SETTING} anew"
        ) from e
    if len(content) > LARGEST_BYTES:
        raise failure(name, f"it has more than the allowed {LARGEST_BYTES} bytes")
    return content


def read_mapping(content: bytes, name: str) -> dict[str, Any]:
    """A file of the operator's as JSON.

    Raises:
        SetupFailed: it is no JSON, or no object.
    """
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        # Not with the error as its cause: that holds the whole document.
        raise failure(name, "it is no JSON object")
    return document


def text_of(document: dict[str, Any], key: str, name: str, hint: str = "") -> str:
    """A string that has to be in a file of the operator's.

    Raises:
        SetupFailed: it is not there, or empty.
    """
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise failure(name, f"it has no {key!r}", hint)
    return value


def failure(name: str, cause: str, hint: str = "", **facts: Any) -> SetupFailed:
    """The error of a step whose account cannot be used.

    Args:
        name: the file that the task names.
        cause: why not, without a secret.
        facts: more of them.
    """
    return SetupFailed(
        f"the account of {name!r} (setting {SETTING!r}) cannot be used: {cause}",
        hint=hint,
        **{"setting": SETTING, "file": name, "output": "", **facts},
    )


def without(text: str, secrets: Iterable[str]) -> str:
    """A text of another program's with the secrets taken out of it."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN) if secret else text
    return text
