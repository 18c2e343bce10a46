"""Grading a kept end state again: the same desktop, restored and judged as a copy, by what graded it before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import trio

from drums.errors import CheckerChanged, EndStateNotFound, EpisodeNotFound
from drums_core import end_states
from drums_core.checkpoint import Checkpoint
from drums_core.end_states import EndState
from drums_core.journal import read_episode
from drums_core.model import Json
from drums_core.rewards import graders
from drums_core.verifying import regrade

if TYPE_CHECKING:
    from drums_core.host import Host

_GRADERS = ("task_sha256", "checker", "steps", "drums")
"""The parts of a reward's provenance that say what graded. CRIU, kernel and image are the checkpoint's own business."""


@attrs.frozen
class Grade:
    """One grading: a score, or why there is none. `at` is in seconds since the epoch, None for the one just made."""

    score: float | None
    checker_error: str | None
    checker_error_cause: str | None
    at: float | None = None


@attrs.frozen
class Reverification:
    """Two gradings of one end state.

    Args:
        episode: whose end state it is.
        checkpoint: its id.
        agree: whether both have the same score, or both none.
        recorded: the grade in the journal.
        again: the grade of now.
        differences: what of the graders differs from the recorded ones; empty unless that was allowed.
        thawed: which requests needed living processes, and could meet something else each time.
    """

    episode: str
    checkpoint: str
    agree: bool
    recorded: Grade
    again: Grade
    differences: tuple[str, ...]
    thawed: tuple[Json, ...]

    def to_dict(self) -> dict[str, Json]:
        """All of it in JSON's own types."""
        return attrs.asdict(self) | {"differences": list(self.differences), "thawed": list(self.thawed)}


async def reverify(host: Host, identity: str, *, anyway: bool) -> Reverification:
    """Grade the kept end state of an episode again and compare.

    Args:
        identity: the episode.
        anyway: grade also where the task's checker is not what it was.

    Raises:
        EpisodeNotFound: there is none.
        EndStateNotFound: none was kept, or it was removed since.
        CheckpointError: it is damaged, or of another kind of host.
        CheckerChanged: what would grade it is not what graded it.
        VerifierNotFound: that is gone.
    """
    config, store = host.config, host.services.store
    await end_states.sweep(store, config)
    await host.journal.flush()
    try:
        episode = await trio.to_thread.run_sync(read_episode, config.state_dir, identity)
    except LookupError as e:
        raise EpisodeNotFound(f"no episode {identity!r}", episode=identity) from e
    reward = _last_kept(episode)
    checkpoint = await trio.to_thread.run_sync(_load, host, identity, reward["provenance"]["graded"]["checkpoint"])
    task = checkpoint.task()
    assert task is not None
    pinned = await trio.to_thread.run_sync(host.pin, task)
    now = _plain({"task_sha256": task.sha256, **graders(host, task, pinned)})
    differences = tuple(_differences({k: reward["provenance"].get(k) for k in _GRADERS}, now))
    if differences and not anyway:
        raise CheckerChanged(
            f"the end state of episode {identity!r} was graded by something else: {'; '.join(differences)}",
            hint="install what graded it, or let what is installed grade it: --anyway, reverify(anyway=True)",
            episode=identity,
            differences=list(differences),
        )
    score, failure, thawed = await regrade(host, checkpoint, EndState.kept_in(checkpoint), task, pinned)
    again = Grade(
        score,
        failure.message if failure else None,
        (failure.cause or "unknown") if failure else None,
    )
    recorded = Grade(reward["score"], reward["checker_error"], reward["checker_error_cause"], reward["at"])
    agree = recorded.score == again.score
    return Reverification(identity, checkpoint.id, agree, recorded, again, differences, tuple(thawed))


def _last_kept(episode: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last reward of an episode whose graded copy was kept."""
    for reward in reversed(episode["rewards"]):
        if reward["provenance"].get("graded", {}).get("kept"):
            found: Mapping[str, Any] = reward
            return found
    raise EndStateNotFound(
        f"no end state of episode {episode['id']!r} was kept",
        hint="verify(keep=True), drums verify --keep, or keep_end_states = true in the host's configuration",
        episode=episode["id"],
    )


def _load(host: Host, episode: str, identity: str) -> Checkpoint:
    config, store = host.config, host.services.store
    if all(m.id != identity for m in store.names()) and not (store.path / identity).exists():
        age = config.end_state_max_age_s
        bound = "" if age is None else f" for {age:g} s"
        raise EndStateNotFound(
            f"the end state of episode {episode!r}, {identity!r}, was removed",
            hint=f"this host keeps {config.max_end_states}{bound}: see max_end_states, end_state_max_age_s",
            episode=episode,
            checkpoint=identity,
        )
    return store.load(identity)


def _plain(document: Any) -> Any:
    """As it would be read from the journal."""
    return json.loads(json.dumps(document, default=repr))


def _differences(recorded: Any, now: Any, path: str = "") -> Iterator[str]:
    """What differs, by the path of each value."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        for key in sorted({*recorded, *now}):
            yield from _differences(recorded.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif recorded != now:
        yield f"{path} was {recorded!r:.80}, is {now!r:.80}"
