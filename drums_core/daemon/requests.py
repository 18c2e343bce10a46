"""What is asked: a class per body and query, which are checked against it; `/openapi.json` is made of them."""

# No `from __future__ import annotations`: the types are read at run time.

from typing import Annotated, Literal

import attrs

from drums_core.host import UNSET
from drums_core.model import LONGEST_LABEL


@attrs.frozen
class Bound:
    """What a value must be besides its type; the names are those of JSON Schema, roughly."""

    gt: float | None = None
    ge: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None


Name = Annotated[str, Bound(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Reason = Annotated[str, Bound(min_length=1, max_length=2000)]
Label = Annotated[str, Bound(min_length=1, max_length=LONGEST_LABEL)]
Path = Annotated[str, Bound(min_length=1, max_length=4096)]
Lease = Annotated[float, Bound(gt=0, le=10 * 365 * 86400.0)]
Timeout = Annotated[float, Bound(gt=0, le=3600.0)]


@attrs.frozen
class CreateSlot:
    """A new desktop. `ttl` is in seconds; null is unlimited, where the host allows it; absent is the host's default.

    `labels`, 16 at most, are kept with its episodes and its children's: the name of the policy that acts, say. The
    label `drums` is drums' own.
    """

    task: Annotated[str, Bound(min_length=1, max_length=200)] | None = None
    image: Name | None = None
    checkpoint: Name | None = None
    ttl: Lease | None = UNSET
    network: Literal["none"] = "none"
    labels: dict[Name, Label] = attrs.field(factory=dict)


@attrs.frozen
class ForkSlot:
    """`n` children, each a new slot."""

    n: Annotated[int, Bound(ge=1, le=1000)] = 1


@attrs.frozen
class SaveSlot:
    """Keep the desktop's state under a name."""

    name: Name


@attrs.frozen
class StepSlot:
    """One action of the agent: pyautogui code, or WAIT, DONE or FAIL."""

    action: str


@attrs.frozen
class ExecuteInSlot:
    """A command as the agent's user; `timeout` is in seconds."""

    command: str | list[str]
    shell: bool = False
    timeout: Timeout = 120.0


@attrs.frozen
class WaitForVerdict:
    """Wait until the verdict is not pending, `timeout` seconds at most (600 when null or more)."""

    timeout: Annotated[float, Bound(ge=0)] | None = None


@attrs.frozen
class VerifySlot:
    """Score a frozen copy of the desktop, or with `in_place` the desktop itself; null is as the host is configured.

    `keep` keeps the copy as the episode's end state; likewise.
    """

    in_place: bool | None = None
    keep: bool | None = None


@attrs.frozen
class ReverifyEpisode:
    """Grade the kept end state of an episode again; with `anyway` also by another checker than the first time's."""

    anyway: bool = False


@attrs.frozen
class QuarantineSlot:
    """Mark the episode as broken."""

    reason: Reason


@attrs.frozen
class ExtendSlot:
    """Let the slot live `ttl` seconds from now; null is unlimited, where the host allows it."""

    ttl: Lease | None


@attrs.frozen
class Nothing:
    """No fields."""


@attrs.frozen
class FileQuery:
    """The file's path in the desktop; relative paths begin at the user's home."""

    path: Path


@attrs.frozen
class EpisodesQuery:
    """Newest first; `before` is the id of the last episode seen."""

    limit: Annotated[int, Bound(ge=1, le=1000)] = 100
    before: Annotated[str, Bound(min_length=1, max_length=64)] | None = None


@attrs.frozen
class StatsQuery:
    """Groups by task, by the value of a label, or by both; `since` is in seconds since the epoch.

    `all` adds the episodes that drums made itself: of its self-test, its demo and trials of verifiers.
    """

    by: Literal["task", "label", "both"] = "both"
    label: Name = "policy"
    since: Annotated[int, Bound(ge=0)] | None = None
    all: bool = False
