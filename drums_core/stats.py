"""How episodes came out, per task and per label: what shows that a policy buys invalid episodes, or breaks checkers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from drums_core.journal_file import reading
from drums_core.model import OWN_LABEL, Json

_GROUP = {
    "task": "episodes.task, NULL",
    "label": "NULL, json_extract(labels, :label)",
    "both": "episodes.task, json_extract(labels, :label)",
}
_LAST_REWARD = "rewards.number = (SELECT max(number) FROM rewards WHERE rewards.episode = episodes.id)"
_CHOSEN = f"started_at >= :since AND (:all OR json_extract(labels, '$.{OWN_LABEL}') IS NULL)"
_COUNTS = """
SELECT {group}, count(*), sum(episodes.verdict = 'valid'), sum(episodes.verdict = 'invalid'), count(rewards.number),
    count(rewards.score), avg(CASE WHEN episodes.verdict = 'valid' AND rewards.valid THEN rewards.score END),
    count(json_extract(rewards.reward, '$.checker_error')), count(json_extract(rewards.reward, '$.checker_skipped'))
FROM episodes LEFT JOIN rewards ON {last_reward} WHERE {chosen} GROUP BY 1, 2 ORDER BY 1, 2
"""
_FAILURES = """
SELECT {group}, gate, cause, count(DISTINCT episode) FROM gate_results JOIN episodes ON episodes.id = episode
WHERE status = 'fail' AND {chosen} GROUP BY 1, 2, gate, cause ORDER BY 5 DESC, gate, cause
"""

# Rewards of earlier versions have no cause.
_CHECKER_ERRORS = """
SELECT {group}, coalesce(json_extract(rewards.reward, '$.checker_error_cause'), 'unknown'), count(*)
FROM episodes JOIN rewards ON {last_reward}
WHERE json_extract(rewards.reward, '$.checker_error') IS NOT NULL AND {chosen} GROUP BY 1, 2, 3 ORDER BY 3
"""


def read_stats(
    state_dir: Path,
    *,
    by: Literal["task", "label", "both"] = "both",
    label: str = "policy",
    since: float | None = None,
    all: bool = False,
) -> list[dict[str, Json]]:
    """A row per group, as `drums_core.daemon.wire.StatsRow` describes it. Blocks.

    Args:
        by: what makes a group: the task, the value of the label, or the pair.
        label: a label's name.
        since: only episodes that began then (seconds since the epoch) or later.
        all: also the episodes that drums made itself, for its self-test, its demo and trials of verifiers.

    Raises:
        JournalError: the journal cannot be read.
    """
    values = {"label": f'$."{label}"', "since": since or 0, "all": all}

    def of(query: str) -> str:
        return query.format(group=_GROUP[by], last_reward=_LAST_REWARD, chosen=_CHOSEN)

    with reading(state_dir) as db:
        if db is None:
            return []
        counts = [tuple(row) for row in db.execute(of(_COUNTS), values)]
        failures: dict[tuple[Json, Json], list[Json]] = {}
        for task, value, gate, cause, episodes in db.execute(of(_FAILURES), values):
            failures.setdefault((task, value), []).append({"gate": gate, "cause": cause, "episodes": episodes})
        causes: dict[tuple[Json, Json], dict[str, Json]] = {}
        for task, value, cause, count in db.execute(of(_CHECKER_ERRORS), values):
            causes.setdefault((task, value), {})[cause] = count
    rows = []
    for task, value, episodes, valid, invalid, rewards, scored, mean, errors, skipped in counts:
        rows.append(
            {
                "task": task,
                "label": value,
                "episodes": episodes,
                "valid": valid,
                "invalid": invalid,
                "pending": episodes - valid - invalid,
                "valid_rate": _rate(valid, valid + invalid),
                "failures": failures.get((task, value), []),
                "rewards": rewards,
                "scored": scored,
                "mean_score": mean,
                "checker_errors": errors,
                "checker_error_causes": causes.get((task, value), {}),
                "checker_error_rate": _rate(errors, rewards),
                "checker_skipped": skipped,
            }
        )
    return rows


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None
