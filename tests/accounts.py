"""The operator's folder with accounts, as tests lay it out, and the step `googledrive` with it. No test itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drive_server import CLIENT_SECRET, REFRESH_TOKEN, DriveServer

from drums.errors import SetupFailed
from drums_core.abc import Accounts
from drums_core.testing import FakeStepContext
from drums_osworld.steps.googledrive import GoogleDrive

SETTINGS = "evaluation_examples/settings/googledrive/settings.yml"
TOKENS = "evaluation_examples/settings/googledrive/credentials.json"
GOOGLE = "evaluation_examples/settings/google/settings.json"
EMAIL, PASSWORD = "someone@mail.example", 'pass"word\\Xv8'
MARK = "https://huggingface.co/datasets/xlangai/ubuntu_osworld_file_cache/resolve/main/"


def write_account(folder: Path, token_uri: str, **tokens: Any) -> None:
    """The operator's folder, as PyDrive's sign-in leaves it."""
    yaml = (
        f"client_config_backend: file\nsave_credentials: True\nsave_credentials_backend: file\n"
        f"save_credentials_file: {TOKENS}\nget_refresh_token: True\n"
    )
    saved = {
        "_class": "OAuth2Credentials",
        "access_token": "old",
        "client_id": "client",
        "client_secret": CLIENT_SECRET,
        "refresh_token": REFRESH_TOKEN,
        "token_uri": token_uri,
        **tokens,
    }
    contents = {SETTINGS: yaml, TOKENS: json.dumps(saved), GOOGLE: json.dumps({"email": EMAIL, "password": PASSWORD})}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def context_at(server: DriveServer, folder: Path) -> FakeStepContext:
    """One with an account at the stand-in, in this folder, and one file."""
    write_account(folder, f"{server.url}/token")
    return FakeStepContext(
        accounts=Accounts(folder, server.url, f"{server.url}/page"),
        files={f"{MARK}a.pdf": bytes(range(256)) * 3000},
    )


def parameters(*operations: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    names, args = [x for x, _ in operations], [x for _, x in operations]
    return {"settings_file": SETTINGS, "operation": names, "args": args}


async def run(context: FakeStepContext, *operations: tuple[str, dict[str, Any]]) -> None:
    step = GoogleDrive()
    await step.run(context, step.parse(parameters(*operations)))


async def refused(context: FakeStepContext, *operations: tuple[str, dict[str, Any]]) -> SetupFailed:
    with pytest.raises(SetupFailed) as info:
        await run(context, *(operations or [("delete", {"query": "title = 'x'"})]))
    assert info.value.setting == "accounts"
    return info.value
