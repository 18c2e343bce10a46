"""What plugins implement and what they are handed. Everything here is public.

Hooks register factories; these objects do the work, with async methods that the core runs in its nurseries.
A gate reads the host's side only (proc, cgroup files, netlink, the layers): nothing that the agent can write
decides it. Constructors do no I/O. One gate object serves all desktops of a host, concurrently: keep no
per-desktop state on it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import attrs
import trio

from drums_core.model import (
    DesktopEvent,
    Finding,
    Json,
    KernelLimits,
    Limits,
    Phase,
    PluginRecord,
    ProcessIdentity,
    SetupStep,
    Task,
)


@runtime_checkable
class CgroupView(Protocol):
    """A desktop's cgroup as the kernel shows it."""

    @property
    def paths(self) -> Sequence[Path]:
        """Its directories: one on version 2, one per controller on version 1."""

    def members(self) -> Mapping[Path, frozenset[int]]:
        """Host pids of every directory's `cgroup.procs` (thread group leaders; zombies left out)."""

    def read_limits(self) -> KernelLimits:
        """The limits as the kernel reads them back."""

    def oom_kills(self) -> int:
        """How many processes the out-of-memory killer has taken in it."""


class GuestProbe(Protocol):
    """Asking the guest server over the path that clients use."""

    async def health(self) -> None:
        """Ask the guest server whether it is there.

        Raises:
            GuestError: no answer, a wrong one, or one that does not prove knowledge of the desktop's secret.
        """


@attrs.frozen
class DesktopView:
    """What a gate may look at: one desktop, from the host.

    Args:
        slot: the slot's id.
        pid1: host pid of the desktop's init.
        root: the desktop's file tree as mounted on the host; never follow a link in it.
        home: the home directory relative to `root`.
        cgroup: the desktop's cgroup.
        limits: the limits asked for.
        namespaces: inode of each namespace of the desktop by kind (pid, mnt, net, ipc, uts, user, time).
        others: slot id -> such a mapping, of every other desktop alive on this host.
        init_argv: the command line that the desktop's init was started with.
        restored: the processes that the restore made, read before their first instruction (empty at a dump).
        guest: the guest server.
        ready_limit_s: seconds within which the guest server must answer.
        event_sources: their timers and connections, read at the last moment before that instruction (empty at a dump).
    """

    slot: str
    pid1: int
    root: Path
    home: str
    cgroup: CgroupView
    limits: Limits
    namespaces: Mapping[str, int]
    others: Mapping[str, Mapping[str, int]]
    init_argv: tuple[str, ...]
    restored: tuple[ProcessIdentity, ...]
    guest: GuestProbe
    ready_limit_s: float
    event_sources: tuple[Json, ...] = ()


class Gate(Protocol):
    """A check of a restored desktop, with what it recorded when the desktop was frozen."""

    phase: Phase
    records: bool  # whether `record` gives evidence without which `check` fails

    async def record(self, view: DesktopView) -> Json:
        """Evidence of a frozen desktop, normalised; called only where `records` is true. May raise: the dump fails."""

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether the desktop equals the evidence. Raising, or taking too long, counts as a failure."""


@runtime_checkable
class EventGate(Protocol):
    """A gate that is added as failed when something happens."""

    phase: Phase  # Phase.EVENT

    def judge(self, event: DesktopEvent) -> Finding | None:
        """A failed finding when the event breaks this gate, else None. Must not block."""


class CommandOutcome(Protocol):
    """What a command in the desktop did, whoever says so."""

    @property
    def returncode(self) -> int:
        """Its exit code."""

    @property
    def output(self) -> str:
        """Its standard output."""

    @property
    def error(self) -> str:
        """Its standard error."""

    @property
    def truncated(self) -> bool:
        """Whether one of the streams was longer than the guest server passes on."""


@attrs.frozen
class CommandResult:
    """What a command in the desktop did. `output` and `error` are its streams, decoded with replacement."""

    returncode: int
    output: str
    error: str


@attrs.frozen
class Pinned:
    """What will score an episode, as it was when the episode began.

    Args:
        facts: what the reward says about it; JSON.
        handle: what the checker needs to find it again.
    """

    facts: Mapping[str, Json]
    handle: object


GOOGLE_API = "https://www.googleapis.com"
GOOGLE_DRIVE_PAGE = "https://drive.google.com/drive/my-drive"


@attrs.frozen
class Accounts:
    """The operator's accounts at services elsewhere, for the steps that need one.

    Args:
        folder: the folder on the host where the files lie in which tasks look for passwords and tokens; None without.
        google_api: the base URL of Google's APIs.
        google_drive_page: the page of Google Drive, where a browser is asked to sign in.
    """

    folder: Path | None = None
    google_api: str = GOOGLE_API
    google_drive_page: str = GOOGLE_DRIVE_PAGE


class StepContext(Protocol):
    """What a set-up step may do to its desktop. Everything acts as the agent's user, uid 1000."""

    screen: tuple[int, int]  # width and height in pixels

    async def fetch(self, url: str) -> bytes:
        """A file that the task names by URL: from this host, or fetched to it. It never comes from the desktop.

        Raises:
            SetupFailed: it cannot be had; names the URL and the cause.
        """

    @property
    def has_acted(self) -> bool:
        """Whether an agent has acted in the desktop: what it left may watch what a step does."""

    @property
    def accounts(self) -> Accounts:
        """The operator's accounts, as the host's configuration has them."""

    async def execute(
        self, command: str | Sequence[str], *, shell: bool = False, timeout_s: float = 120.0
    ) -> CommandResult:
        """Run a command to its end.

        A command that calls `sudo` gets one for its duration: only sudo's operand runs as root, entered from the
        host as trusted provisioning.

        Raises:
            GuestError: the desktop could not be asked (not: a command that failed).
        """

    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None:
        """Start a program and leave it running."""

    async def open_file(self, path: str, *, timeout_s: float = 120.0) -> None:
        """Open a file with the program that the desktop has for it, or start a program by its name.

        Returns once a window shows it: one whose title holds the whole name of the file.

        Raises:
            SetupFailed: there is no such file or program, or no such window within the time.
            GuestError: the desktop could not be asked.
        """

    async def activate_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Bring a window to the front; false when there is none.

        Args:
            name: a part of its title, whatever the case; with `strict` the whole title to the letter.
            by_class: `name` is about the window's class (`instance.Class`).
        """

    async def close_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Ask a window to close, without waiting for it; false when there is none. As `activate_window`."""

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file; its folders are made, an old one is overwritten, relative paths begin at the home.

        Raises:
            GuestError: it could not be written.
        """

    def note(self, text: str) -> None:
        """Record something that the episode's reader should know (a non-zero exit, say)."""

    def keep_output(self, name: str, text: str) -> None:
        """Keep a command's output for the checker, as `cache/NAME` of its scratch folder.

        Raises:
            ConfigError: the name is no plain file name.
        """


class Step(Protocol):
    """One type of set-up step."""

    def parse(self, parameters: Mapping[str, Json]) -> object:
        """Check the parameters of a task's step; raises `ConfigError` with the path of each fault."""

    async def run(self, context: StepContext, parameters: object) -> None:
        """Carry the step out; raises `SetupFailed` or `GuestError` when the task cannot be right without it."""


@attrs.frozen
class CheckContext:
    """What a checker is given to score the final desktop.

    Args:
        task: the task; deep-copied, so that a checker that changes it changes nothing else.
        last_action: the agent's last action as a string (`WAIT`, `DONE`, `FAIL` or code), None when there was none.
        serve_guest: answer for the desktop on a listening socket's descriptor (which it takes over) until cancelled:
            every request is signed and passed on, to the copy's examiner, or to the desktop's guest server where that
            is graded in place. Used for a worker process that has no other network. Its result is never awaited
            for; see `transport_failures`.
        transport_failures: lines about requests that could not be answered; any of them withholds the score.
        run_steps: carry out set-up steps (an evaluator's `postconfig`).
        scratch: a directory for this check on the host, removed afterwards; `cache/` in it holds the outputs that
            set-up steps kept.
        pinned: what `PinningChecker.pin` gave when the episode began; None for other checkers.
        findings: what the checker says about its score; JSON, goes into the reward's provenance.
        serve_ports: the ports of the desktop that a checker can have as well, 9222 and 8080; each is served as
            `serve_guest` does it, with the bytes passed on as they are.
        wait_there: wait until there is a desktop to ask: for an `EarlyChecker`. `run_steps` and those that serve wait
            by themselves.
    """

    task: Task
    last_action: str | None
    serve_guest: Callable[[int], Awaitable[None]]
    transport_failures: list[str]
    run_steps: Callable[[Sequence[SetupStep]], Awaitable[None]]
    scratch: Path
    pinned: Pinned | None = None
    findings: dict[str, Json] = attrs.field(factory=dict)
    serve_ports: Mapping[int, Callable[[int], Awaitable[None]]] = attrs.field(factory=dict)
    wait_there: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint


class FileFacts(Protocol):
    """What is at a path, a link itself and not what it leads to."""

    @property
    def kind(self) -> str:
        """`file`, `folder`, `link`, or `special` (a device, a pipe, a socket)."""

    @property
    def size_bytes(self) -> int:
        """The length of a file's content."""

    @property
    def mode(self) -> int:
        """Its permission bits."""

    @property
    def modified_s(self) -> float:
        """When it was last changed, in seconds since the epoch, by the desktop's clock."""

    @property
    def target(self) -> str:
        """Where a link leads, "" for anything else."""


class VerifiedDesktop(Protocol):
    """What an operator's verifier, `FN(desktop, task, **options)`, is given: the final desktop, to look at.

    It runs in a worker of its own. What is asked is done as the agent's user, in a frozen copy of the desktop, or in
    the desktop itself where that is graded in place. A request that is not answered ends the verifier, and there is no
    score: that is never the agent's failure. Paths begin at `/`, or with `~/` or nothing at the agent's home.
    """

    last_action: str | None  # the agent's; None when there was none

    def read_file(self, path: str, *, limit_bytes: int = 64 << 20) -> bytes:
        """A file's content.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it is a folder, or something else that is no regular file, or larger than `limit_bytes`.
        """

    def read_text(self, path: str, *, limit_bytes: int = 64 << 20) -> str:
        """A text file in UTF-8; raises as `read_file` does, and `ValueError` when it is no such text."""

    def stat(self, path: str) -> FileFacts | None:
        """What is at a path; None when there is nothing that the agent's user can see. Links are not followed."""

    def exists(self, path: str) -> bool:
        """Whether there is anything at a path; a dangling link is nothing."""

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder at a path."""

    def list_directory(self, path: str) -> dict[str, Json]:
        """The tree below a folder: `type` (directory, file), `name`, `children`; raises `NotADirectoryError`."""

    def execute(
        self,
        command: str | Sequence[str],
        *,
        shell: bool | None = None,
        timeout_s: float = 60.0,
        applications: bool = False,
    ) -> CommandOutcome:
        """Run a command to its end; a line is the shell's, a list is not. It must not change the desktop.

        With `applications` they run meanwhile, and what the agent left with them; otherwise they stay frozen.
        """

    def screenshot(self) -> bytes:
        """The screen as PNG."""

    def windows(self) -> list[dict[str, Json]]:
        """The windows: `id`, `title`, `class` (instance and class), `pid`, `x`, `y`, `width`, `height`, `active`."""

    def accessibility(self) -> str:
        """The accessibility tree as XML, in OSWorld's form."""

    def clipboard(self) -> str | None:
        """The text in the clipboard, None when there is none."""

    def browser_targets(self, *, port: int = 9222) -> list[dict[str, Json]]:
        """What a browser lists at its debugging port: `id`, `type`, `title`, `url` and so on.

        Raises:
            ConnectionRefusedError: nothing listens there.
            ValueError: what listens there is no browser's debugging port.
        """

    def cdp(
        self, method: str, params: Mapping[str, Json] | None = None, *, target: str | None = None, port: int = 9222
    ) -> dict[str, Json]:
        """One call of the Chrome DevTools Protocol, and its `result`; it must not change the page.

        Args:
            target: the id of one of `browser_targets`; the first page by default.

        Raises:
            ConnectionRefusedError: nothing listens there.
            LookupError: there is no such target.
            ValueError: the browser refused the call, or what listens there is no browser.
        """


class Checker(Protocol):
    """Scores a task's final desktop."""

    def claims(self, evaluator: Mapping[str, Json]) -> bool:
        """Whether this checker is the one for such an evaluator."""

    def validate(self, task: Task) -> None:
        """Refuse at create what could not be checked later (`VerifierNotFound`, `ConfigError`)."""

    def provenance(self, task: Task) -> Mapping[str, Json]:
        """What the reward says about this checker: its package, version, file hash."""

    async def check(self, context: CheckContext) -> float:
        """The score.

        Raises:
            CheckerError: the checker failed, or the desktop could not be asked: there is no score.
        """


@runtime_checkable
class EarlyChecker(Protocol):
    """A checker whose `check` is called while the copy is still made, so that what it loads costs no time.

    It awaits `CheckContext.wait_there` before it does what is to happen to a finished desktop. Its time counts from
    then on, and neither its score nor its error counts where the copy turns out to be broken.
    """

    begins_early: bool


@runtime_checkable
class PinningChecker(Protocol):
    """A checker whose code may change under a running host."""

    def pin(self, task: Task, folder: Path) -> Pinned:
        """Keep what will score a task as it is now. Blocks; called as each episode begins.

        Args:
            folder: of the host's, removed when the host ends; the same for all episodes.

        Raises:
            VerifierNotFound: it is gone.
        """


@runtime_checkable
class PreparingChecker(Protocol):
    """A checker that needs something on the host which may have to be fetched."""

    async def prepare(self, task: Task) -> None:
        """Have what a check of a task needs, before an episode is spent on it. At create, before anything starts.

        Raises:
            SetupFailed: it cannot be had; the create is refused. Of no step: `index` is None, `step_type` empty.
        """


@runtime_checkable
class ServingChecker(Protocol):
    """A checker that has something to do while its host is open."""

    async def serve(self) -> None:
        """Runs from when the host opens until it closes, which cancels it; then it leaves nothing. Raises nothing."""


@runtime_checkable
class PackagedChecker(Protocol):
    """A checker that runs code of packages that it finds itself."""

    def installed(self, *, anew: bool = False) -> Sequence[PluginRecord]:
        """Those packages' entry points, with what is wrong with them. Blocks.

        Args:
            anew: load each again, also those whose files have not changed since.
        """


class Catalogue(Protocol):
    """A source of tasks."""

    def tasks(self) -> Sequence[Task]:
        """All tasks, in a fixed order."""

    def find(self, prefix: str) -> Task:
        """The task with this id or unique prefix of 8 or more characters; raises `TaskNotFound`, `ConfigError`."""
