"""drums: Linux desktops for computer-use agents, with a validity verdict on every score.

    import drums

    with drums.connect() as client, client.create(task="e0df059f", ttl=600) as env:
        env.step("pyautogui.click(100, 100)")
        reward = env.verify(strict=False)

Names are imported when they are first used, so that `import drums` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drums._async_client import AsyncClient, AsyncEnv, connect_async
    from drums._client import Client, Env, connect
    from drums.batches import RewardBatch, batch_of
    from drums.errors import (
        AuthError,
        CapacityExhausted,
        CheckerChanged,
        CheckerError,
        CheckpointError,
        CheckpointNotFound,
        ConfigError,
        DaemonUnreachable,
        DesktopError,
        DesktopFileNotFound,
        DrumsError,
        DumpError,
        EndStateNotFound,
        EpisodeNotFound,
        FileUnsuitable,
        GuestError,
        ImageBuildError,
        ImageNotFound,
        ImageUnsuitable,
        InsecureTransport,
        InvalidEpisode,
        InvalidTransition,
        PluginError,
        PortError,
        PortNotAllowed,
        PrerequisiteError,
        RestoreError,
        SetupFailed,
        SlotBusy,
        SlotNotFound,
        SlotQuarantined,
        TaskAmbiguous,
        TaskNotFound,
        TaskUnsupported,
        VerifierNotFound,
    )
    from drums.reward import Reward, Verdict

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncEnv",
    "AuthError",
    "CapacityExhausted",
    "CheckerChanged",
    "CheckerError",
    "CheckpointError",
    "CheckpointNotFound",
    "Client",
    "ConfigError",
    "DaemonUnreachable",
    "DesktopError",
    "DesktopFileNotFound",
    "DrumsError",
    "DumpError",
    "EndStateNotFound",
    "Env",
    "EpisodeNotFound",
    "FileUnsuitable",
    "GuestError",
    "ImageBuildError",
    "ImageNotFound",
    "ImageUnsuitable",
    "InsecureTransport",
    "InvalidEpisode",
    "InvalidTransition",
    "PluginError",
    "PortError",
    "PortNotAllowed",
    "PrerequisiteError",
    "RestoreError",
    "Reward",
    "RewardBatch",
    "SetupFailed",
    "SlotBusy",
    "SlotNotFound",
    "SlotQuarantined",
    "TaskAmbiguous",
    "TaskNotFound",
    "TaskUnsupported",
    "Verdict",
    "VerifierNotFound",
    "batch_of",
    "connect",
    "connect_async",
]

_ELSEWHERE = {
    "AsyncClient": "drums._async_client",
    "AsyncEnv": "drums._async_client",
    "Client": "drums._client",
    "Env": "drums._client",
    "Reward": "drums.reward",
    "RewardBatch": "drums.batches",
    "Verdict": "drums.reward",
    "batch_of": "drums.batches",
    "connect": "drums._client",
    "connect_async": "drums._async_client",
}
"""Where a public name is that is no error of `drums.errors`."""


# Type checkers read the imports above; to them this would make every name one of the package's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_ELSEWHERE.get(name, "drums.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
