"""End states: the checkpoint of the copy that `verify` graded, kept on request so that it can be graded again.

An end state is a checkpoint of the kind `end_state`, named by its episode, of which each has one at most. How many
there are and how old they get is bounded (`max_end_states`, `end_state_max_age_s`): what is beyond is removed when one
is kept, when one is asked for, and when a host opens. One that is being graded stays until then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import attrs
import cattrs
import structlog
import trio

from drums.errors import CheckpointError
from drums_core.checkpoint import Checkpoint, CheckpointStore, Manifest
from drums_core.durable import take_lock

if TYPE_CHECKING:
    from drums_core.config import HostConfig
    from drums_core.slot import Slot

_log = structlog.get_logger("drums.end_states")
KIND = "end_state"


@attrs.frozen
class EndState:
    """What a grade rests on besides the desktop and the task.

    Args:
        episode: of which it is the end.
        slot: whose desktop it was.
        acted: whether an agent had acted in it.
        last_action: the agent's last action, None when there was none.
        outputs: of set-up commands, kept for the checker.
    """

    episode: str
    slot: str
    acted: bool
    last_action: str | None
    outputs: Mapping[str, str]

    @classmethod
    def of(cls, slot: Slot) -> Self:
        """That of a slot as it is now."""
        episode = slot.episode
        return cls(episode.id, slot.id, slot.has_acted, episode.last_action, dict(episode.outputs))

    @classmethod
    def kept_in(cls, checkpoint: Checkpoint) -> Self:
        """That of a kept end state.

        Raises:
            CheckpointError: the checkpoint is none.
        """
        manifest = checkpoint.manifest
        try:
            return cattrs.structure(manifest.end_state, cls)
        except (cattrs.BaseValidationError, TypeError, ValueError) as e:
            raise CheckpointError(f"checkpoint {manifest.id!r} is no end state", checkpoint=manifest.id) from e


def remove(store: CheckpointStore, manifest: Manifest) -> None:
    """Remove an end state, and what was kept for its sake alone. Blocks.

    Raises:
        CheckpointError: it is being graded, by this host or another one.
    """
    try:
        lock = take_lock(store.path / manifest.id)
    except BlockingIOError:
        raise CheckpointError(f"checkpoint {manifest.id!r} is in use", checkpoint=manifest.id) from None
    except FileNotFoundError:
        return  # another host was faster
    try:
        store.discard_alone(manifest)
    finally:
        os.close(lock)


async def sweep(store: CheckpointStore, config: HostConfig) -> None:
    """Remove the end states that are beyond the bounds, but those that are being graded."""
    await trio.to_thread.run_sync(_sweep, store, config)


def _sweep(store: CheckpointStore, config: HostConfig) -> None:
    kept = sorted((m for m in store.names() if m.kind == KIND), key=lambda m: m.created_at, reverse=True)
    oldest = -float("inf") if config.end_state_max_age_s is None else time.time() - config.end_state_max_age_s
    episodes: set[str] = set()
    for manifest in kept:
        if manifest.name not in episodes and manifest.created_at >= oldest and len(episodes) < config.max_end_states:
            episodes.add(manifest.name)
            continue
        try:
            remove(store, manifest)
        except CheckpointError:
            continue  # at the next occasion
        except OSError as e:
            _log.error("an end state cannot be removed", checkpoint=manifest.id, error=str(e))
            continue
        _log.info("an end state is removed", episode=manifest.name, checkpoint=manifest.id)
