"""The reward of an episode: put together, and put on disk with whatever has happened until then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

import drums
from drums_core.abc import Pinned
from drums_core.model import Json, Reward, Task
from drums_core.task_needs import checker_for

if TYPE_CHECKING:
    from drums_core.episode import Episode
    from drums_core.host import Host
    from drums_core.slot import Slot
    from drums_core.verifying import Failure


def graders(host: Host, task: Task, pinned: Pinned | None) -> dict[str, Json]:
    """What scores a task, with its versions, as a reward's provenance has it: `checker`, `steps`, `drums`."""
    name, checker, plugin = checker_for(host.checkers, task)
    facts = pinned.facts if pinned else checker.provenance(task)
    return {
        "checker": {"name": name, "plugin": attrs.asdict(plugin), **facts},
        "steps": _steps_of(host, task),
        "drums": drums.__version__,
    }


def _steps_of(host: Host, task: Task) -> dict[str, Json]:
    """Which plugin provides each type of step that a task uses, before its check as well."""
    listed = task.evaluator.get("postconfig")
    after = [x.get("type") for x in listed if isinstance(x, dict)] if isinstance(listed, list) else []
    steps = host.plugins.registry.steps
    used = sorted({*(x.type for x in task.config), *(x for x in after if isinstance(x, str))} & set(steps))
    return {name: attrs.asdict(steps[name][1]) for name in used}


def make_reward(
    slot: Slot,
    *,
    score: float | None,
    failure: Failure | None = None,
    checker_skipped: str | None = None,
    provenance: Mapping[str, Json] | None = None,
) -> Reward:
    """The reward of a slot's current episode as of now."""
    host, task, episode = slot.host, slot.task, slot.episode
    assert task is not None
    validity = episode.validity
    return Reward(
        score=score,
        valid=validity.valid,
        invalid_reasons=validity.invalid_reasons,
        verdict=validity.verdict,
        bad_gates=validity.bad_gates,
        checker_error=failure.message if failure else None,
        checker_error_cause=(failure.cause or "unknown") if failure else None,
        checker_skipped=checker_skipped,
        provenance={
            "episode": episode.id,
            "origin": episode.origin,
            "labels": dict(episode.labels),
            "task": task.id,
            "task_sha256": task.sha256,
            "image": slot.base.manifest.image,
            "image_digest": slot.base.manifest.image_digest,
            "checkpoint": slot.base.id,
            "criu": host.services.criu.version,
            **graders(host, task, episode.pinned),
            "gates": [attrs.asdict(p) for p in host.services.gates.plugin_ids()],
            "causes": [c.value for c in validity.causes],
            "notes": list(episode.notes),
            **(provenance or {}),
        },
    )


async def record_reward(slot: Slot, episode: Episode, reward: Reward) -> Reward:
    """Put a reward on disk; what happened in the episode meanwhile counts, and is recorded with it once more."""
    while True:
        await slot.host.journal.record_reward(episode, reward)
        slot.host.services.watcher.drain()
        slot.check_oom()
        validity = episode.validity
        if validity.bad_gates == reward.bad_gates:
            return reward
        reward = attrs.evolve(
            reward,
            valid=validity.valid,
            verdict=validity.verdict,
            bad_gates=validity.bad_gates,
            invalid_reasons=validity.invalid_reasons,
            provenance={**reward.provenance, "causes": [c.value for c in validity.causes]},
        )
