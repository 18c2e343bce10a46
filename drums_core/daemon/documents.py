"""What is answered: a class per document; `/openapi.json` is made of them."""

# No `from __future__ import annotations`: the types are read at run time.

from typing import Any, Literal

import attrs

Json = Any


@attrs.frozen
class Health:
    """Whether the daemon answers; the rest only with a token."""

    status: Literal["ok"]
    version: str
    slots: int | None = None
    max_slots: int | None = None
    instance: str | None = None


@attrs.frozen
class TaskStep:
    """A set-up step."""

    type: str
    parameters: dict[str, Json]


@attrs.frozen
class TaskDocument:
    """A task. `unsupported_reason` is empty when it is supported.

    `applications` are what an image must have for it, `images` those of drums' own that do; none when `needs_web` says
    that it needs the live web, as desktops have no network. `remarks` say what of its document has no effect here.
    """

    id: str
    domain: str
    instruction: str
    supported: bool
    unsupported_reason: str
    evaluator: dict[str, Json]
    config: list[TaskStep]
    sha256: str
    source: str
    applications: list[str]
    needs_web: bool
    remarks: list[str]
    images: list[str]


@attrs.frozen
class TaskList:
    """All tasks, and the files that cannot be served with the reason."""

    tasks: list[TaskDocument]
    broken: dict[str, str]


@attrs.frozen
class SlotDocument:
    """A slot. `ttl` and `expires_in` are in seconds, null for unlimited."""

    id: str
    state: Literal["starting", "up", "quarantined", "down", "failed", "closed"]
    reason: str
    task: str | None
    image: str
    episode: str | None
    verdict: Literal["pending", "valid", "invalid"] | None
    ttl: float | None
    expires_in: float | None
    created_at: float
    labels: dict[str, str]


@attrs.frozen
class SlotList:
    """Slots."""

    slots: list[SlotDocument]


@attrs.frozen
class CheckpointDocument:
    """A checkpoint."""

    id: str
    name: str
    kind: str
    created_at: float
    size_bytes: int
    image: str
    image_digest: str
    task: str | None


@attrs.frozen
class SavedCheckpoint:
    """The checkpoint that was saved."""

    checkpoint: CheckpointDocument


@attrs.frozen
class CheckpointList:
    """Saved and golden checkpoints, and kept end states."""

    checkpoints: list[CheckpointDocument]


@attrs.frozen
class StepResult:
    """What the code of an action did."""

    status: str
    output: str
    error: str
    returncode: int


@attrs.frozen
class ExecuteResult:
    """What a command did."""

    returncode: int
    output: str
    error: str


@attrs.frozen
class RewardDocument:
    """The reward; its score is null when the checker gave none."""

    score: float | None
    valid: bool
    invalid_reasons: list[str]
    verdict: Literal["pending", "valid", "invalid"]
    bad_gates: list[str]
    checker_error: str | None
    checker_error_cause: Literal["agent", "task", "infrastructure", "unknown"] | None
    checker_skipped: str | None
    provenance: dict[str, Json]


@attrs.frozen
class PluginName:
    """Which plugin, of which distribution."""

    name: str
    distribution: str
    version: str


@attrs.frozen
class GateLine:
    """One gate's line in a report."""

    gate: str
    status: Literal["pass", "fail", "pending"]
    phase: str
    plugin: PluginName
    reason: str | None = None
    cause: str | None = None
    observed: Json = None
    expected: Json = None
    duration_ms: float | None = None


@attrs.frozen
class GateLines:
    """The lines."""

    gates: list[GateLine]


@attrs.frozen
class ValidityDocument:
    """A verdict and what it rests on."""

    verdict: Literal["pending", "valid", "invalid"]
    valid: bool
    bad_gates: list[str]
    invalid_reasons: list[str]
    causes: list[str]


@attrs.frozen
class GateReport:
    """The gate report of an episode."""

    episode: str
    origin: str
    gates: GateLines
    validity: ValidityDocument


@attrs.frozen
class _Episode:
    """What every document about an episode has."""

    id: str
    host: str
    slot: str
    origin: str
    task: str | None
    task_sha256: str | None
    image: str
    image_digest: str
    checkpoint: str
    started_at: float
    ended_at: float | None
    verdict: Literal["pending", "valid", "invalid"]
    bad_gates: list[str]
    invalid_reasons: list[str]
    causes: list[str]
    labels: dict[str, str]


@attrs.frozen
class EpisodeLine(_Episode):
    """An episode in the journal's list; times are seconds since the epoch."""

    score: float | None


@attrs.frozen
class EpisodeList:
    """Episodes, newest first."""

    episodes: list[EpisodeLine]


@attrs.frozen
class RecordedGate:
    """A gate result as the journal has it."""

    gate: str
    status: str
    phase: str
    plugin: PluginName
    reason: str
    cause: str | None
    observed: Json
    expected: Json
    duration_ms: float
    at: float


@attrs.frozen
class RecordedQuarantine:
    """A quarantine as the journal has it."""

    reason: str
    by_user: bool
    at: float


@attrs.frozen
class RecordedReward(RewardDocument):
    """A reward as the journal has it."""

    at: float


@attrs.frozen
class EpisodeDocument(_Episode):
    """An episode with all that the journal has of it."""

    gates: list[RecordedGate]
    quarantines: list[RecordedQuarantine]
    rewards: list[RecordedReward]


@attrs.frozen
class Grade:
    """One grading of an end state; `at` is null for the one that was just made."""

    score: float | None
    checker_error: str | None
    checker_error_cause: Literal["agent", "task", "infrastructure", "unknown"] | None
    at: float | None


@attrs.frozen
class Reverification:
    """Two gradings of one end state. `differences` are those of what graded, empty unless `anyway` was asked for."""

    episode: str
    checkpoint: str
    agree: bool
    recorded: Grade
    again: Grade
    differences: list[str]
    thawed: list[dict[str, Json]]


@attrs.frozen
class FailureCount:
    """How many episodes of a group a gate failed in, for this cause."""

    gate: str
    cause: str | None
    episodes: int


@attrs.frozen
class StatsRow:
    """How the episodes of a group came out.

    `task` or `label` is null where the episodes have none, or are not told apart by it. Rewards are the last ones of
    their episodes. `valid_rate` is that of the judged episodes, `mean_score` that of the valid and scored ones,
    `checker_error_rate` that of the episodes with a reward; each is null when there are none. `checker_error_causes`
    has a number for each of `agent`, `task`, `infrastructure` and `unknown` that there is.
    """

    task: str | None
    label: str | None
    episodes: int
    valid: int
    invalid: int
    pending: int
    valid_rate: float | None
    failures: list[FailureCount]
    rewards: int
    scored: int
    mean_score: float | None
    checker_errors: int
    checker_error_causes: dict[str, int]
    checker_error_rate: float | None
    checker_skipped: int


@attrs.frozen
class Stats:
    """A row per group, in the order of their names."""

    rows: list[StatsRow]


@attrs.frozen
class PluginDocument:
    """An entry point; `error` is empty when it is in use, `sha256` is that of its package's files.

    `note` says, of one in use, that its files have changed since the daemon began.
    """

    name: str
    group: str
    distribution: str
    version: str
    error: str
    trace: str
    sha256: str
    note: str
    ok: bool


@attrs.frozen
class PluginList:
    """All entry points."""

    plugins: list[PluginDocument]


@attrs.frozen
class ImageDocument:
    """A built image; one that is not current was built by another version of drums."""

    name: str
    digest: str
    built_at: float
    drums: str
    size_bytes: int
    current: bool
    golden: str | None


@attrs.frozen
class ImageList:
    """The images that are built."""

    images: list[ImageDocument]


@attrs.frozen
class WrongField:
    """A place of a request that is wrong."""

    path: str
    message: str


@attrs.frozen
class Problem:
    """Problem details (RFC 9457); `code` is stable, `facts` depend on it, `errors` name wrong places of a request."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
    facts: dict[str, Json]
    errors: list[WrongField] | None = None
