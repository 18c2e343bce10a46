"""The values that travel through the runtime: phases, findings, results, limits, processes, events, tasks, rewards.

All frozen; everything that is journalled or sent consists of JSON's own types once unstructured by cattrs.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from drums.errors import ConfigError
from drums.reward import Reward as Reward
from drums.reward import Verdict as Verdict

Json = Any  # what json.dumps takes: dict, list, str, int, float, bool, None


class Phase(enum.StrEnum):
    """When a gate looks; see `docs/concepts.md`."""

    RESTORED = "restored"  # CRIU and drums' own repairs have rebuilt the desktop; nothing has run
    PRE_RESUME = "pre_resume"  # the last moment before the first instruction; final limits are written
    READY = "ready"  # the guest server may answer
    SETTLED = "settled"  # 5 s after it did
    EVENT = "event"  # any time
    VERIFY = "verify"  # just before the checker


class Status(enum.StrEnum):
    """A gate's status in a report."""

    PASS = "pass"
    FAIL = "fail"
    PENDING = "pending"


class Cause(enum.StrEnum):
    """Who brought a failed gate about."""

    INFRASTRUCTURE = "infrastructure"
    AGENT = "agent"
    TASK = "task"


@attrs.frozen
class PluginId:
    """Which plugin made something: its name and the distribution that it came from."""

    name: str
    distribution: str
    version: str


@attrs.frozen
class PluginRecord:
    """One entry point, loaded or not.

    Args:
        sha256: of the files of its package (`package_files.files_sha256`), "" when there are none to read.
        error: why it is not in use, in one line; empty when it is.
        trace: the traceback, where there is one.
        note: what its operator should know about one in use; empty otherwise.
    """

    name: str
    group: str
    distribution: str
    version: str
    error: str = ""
    trace: str = ""
    sha256: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is in use."""
        return not self.error

    @property
    def id(self) -> PluginId:
        """The short form that reports carry."""
        return PluginId(self.name, self.distribution, self.version)


@attrs.frozen
class Finding:
    """What a gate found: `ok`, or why not, with observed against expected (JSON-able)."""

    ok: bool
    reason: str = ""
    observed: Json = None
    expected: Json = None
    cause: Cause = Cause.INFRASTRUCTURE


def passed() -> Finding:
    """The finding of a gate whose evidence holds."""
    return Finding(ok=True)


def failed(
    reason: str, *, observed: Json = None, expected: Json = None, cause: Cause = Cause.INFRASTRUCTURE
) -> Finding:
    """The finding of a gate that does not hold; `reason` is one line in words a person understands."""
    return Finding(ok=False, reason=reason, observed=observed, expected=expected, cause=cause)


@attrs.frozen
class GateResult:
    """One gate's line in an episode's report."""

    gate: str
    status: Status
    phase: Phase
    plugin: PluginId
    reason: str = ""
    cause: Cause | None = None
    observed: Json = None
    expected: Json = None
    duration_ms: float = 0.0


PAGE_BYTES = 4096  # x86-64
_MAX_PIDS = 1 << 22  # the kernel's PID_MAX_LIMIT: pids.max takes no higher number


def _whole_pages(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value % PAGE_BYTES:
        raise ValueError(f"{attribute.name!r} must be a multiple of {PAGE_BYTES}, a page's size: {value}")


@attrs.frozen
class KernelLimits:
    """A cgroup's limits as the kernel reads them back, in the units of `Limits`; None is no limit."""

    cpus: float | None
    memory_bytes: int | None
    swap_bytes: int | None
    pids: int | None


@attrs.frozen
class Limits(KernelLimits):
    """What a desktop may use. Only what the kernel takes and reads back unchanged.

    Args:
        cpus: CPU time in cores (quota over period); 0.01 is the kernel's least.
        memory_bytes: memory limit, whole pages.
        swap_bytes: swap on top of the memory limit, whole pages.
        pids: processes and threads.
    """

    cpus: float = attrs.field(default=2.0, validator=[attrs.validators.ge(0.01), attrs.validators.lt(float("inf"))])
    memory_bytes: int = attrs.field(default=4 << 30, validator=[attrs.validators.ge(PAGE_BYTES), _whole_pages])
    swap_bytes: int = attrs.field(default=0, validator=[attrs.validators.ge(0), _whole_pages])
    pids: int = attrs.field(default=2048, validator=[attrs.validators.ge(1), attrs.validators.le(_MAX_PIDS)])


@attrs.frozen(order=True)
class ProcessIdentity:
    """One process, so that it cannot be taken for another.

    Args:
        inner_pid: pid inside the desktop's pid namespace.
        command: the kernel's command name (`comm`).
        argv: the command line.
        host_pid: pid on the host (0 in recorded evidence: it does not survive a restore).
        start_ticks: start time in clock ticks since boot (0 in recorded evidence).
    """

    inner_pid: int
    command: str
    argv: tuple[str, ...] = ()
    host_pid: int = 0
    start_ticks: int = 0


@attrs.frozen
class ProcessDied:
    """A process of the desktop ended.

    Args:
        host_pid: its pid on the host.
        inner_pid: its pid inside, 0 when it was gone before it could be read.
        command: its command name, "" when unknown.
        signal: the signal that ended it, 0 for a normal exit.
        exit_code: its exit code when no signal ended it.
        core_dumped: whether the kernel marks the end as one with a core dump.
        after_action: whether the agent had acted in this episode before.
    """

    host_pid: int
    inner_pid: int
    command: str
    signal: int
    exit_code: int
    core_dumped: bool
    after_action: bool


@attrs.frozen
class OutOfMemory:
    """The kernel's out-of-memory killer took processes of the desktop's cgroup; `kills` counts all so far."""

    kills: int
    after_action: bool


@attrs.frozen
class Quarantined:
    """The desktop was quarantined for this reason, by its user (`by_user`) or by the runtime."""

    reason: str
    by_user: bool = True


@attrs.frozen
class WatchLost:
    """The kernel dropped notifications, or the watcher was not there: deaths may have gone unseen.

    Args:
        reason: what was lost, in words.
        by_agent: whether the desktop's own processes made the flood, and the agent had acted in it.
    """

    reason: str
    by_agent: bool = False


DesktopEvent = ProcessDied | OutOfMemory | Quarantined | WatchLost


@attrs.frozen
class SetupStep:
    """One step of a task's `config` or `postconfig`."""

    type: str
    parameters: Mapping[str, Json] = attrs.field(factory=dict)


@attrs.frozen
class Task:
    """An OSWorld task. `evaluator` is the document as it stands; `sha256` is that of the task's file.

    `applications` are the executables that an image must have for it; `needs_web` says that it
    cannot be done without the live web; `remarks` what of its document has no effect here, and why.
    """

    id: str
    instruction: str
    config: Sequence[SetupStep]
    evaluator: Mapping[str, Json]
    domain: str
    sha256: str
    supported: bool = True
    unsupported_reason: str = ""
    source: str = ""
    applications: tuple[str, ...] = ()
    needs_web: bool = False
    remarks: tuple[str, ...] = ()


OWN_LABEL = "drums"
"""Says that drums itself made an episode, and for what: no policy acts in it."""

Purpose = Literal["selftest", "demo", "trial", "benchmark"]
MOST_LABELS = 16
LONGEST_LABEL = 200
_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels of a desktop's episodes, `{"policy": "run-7/step-400"}`, as they may be.

    Raises:
        ConfigError: there are too many, a name is malformed or drums' own, or a value is no text of 1 to 200
            characters.
    """
    if len(labels) > MOST_LABELS:
        raise ConfigError(f"{len(labels)} labels, allowed are up to {MOST_LABELS}", path="$.labels")
    for name, value in labels.items():
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r:.80} is no name of a label",
                hint="1 to 64 letters, digits, dots, dashes and underscores",
                path="$.labels",
            )
        if name == OWN_LABEL:
            raise ConfigError(
                f"the label {name!r} is drums' own: it marks episodes that count for no policy",
                hint="choose another name",
                path=f"$.labels.{name}",
            )
        if not isinstance(value, str) or not 0 < len(value) <= LONGEST_LABEL:
            raise ConfigError(
                f"the label {name!r} is {value!r:.80}, allowed is a text of 1 to {LONGEST_LABEL} characters",
                path=f"$.labels.{name}",
            )
    return dict(labels)


@attrs.frozen
class Validity:
    """A verdict with what made it. `invalid_reasons` are sentences; `bad_gates` the gates that failed."""

    verdict: Verdict
    bad_gates: tuple[str, ...] = ()
    invalid_reasons: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether the verdict is `valid`."""
        return self.verdict is Verdict.VALID
