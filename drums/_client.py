"""The synchronous client: `drums.connect()`, `Client` and `Env`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from drums import _calls
from drums._calls import Default, Document, SlotView, note_failed_close
from drums._endpoint import Endpoint, find_endpoint
from drums._spawn import SpawnedDaemon, is_wanted
from drums._transport import SyncTransport
from drums.errors import DrumsError

if TYPE_CHECKING:
    from drums.reward import Reward


def connect(url: str | None = None, token: str | None = None, allow_insecure_http: bool = False) -> Client:
    """A client of a drums daemon; use it as a context manager.

    Without a URL, here or in `DRUMS_URL`, and without a daemon on the default address, a daemon is started that lives
    as long as the client (where the host extras and root are there), and standard error says so.

    Args:
        url: `http://…`, `https://…` or `unix:/path`; `DRUMS_URL`, then `http://127.0.0.1:7070`, by default.
        token: by default `DRUMS_TOKEN`, then, for a daemon on this machine, the token file in its state folder.
        allow_insecure_http: let the token travel over plain HTTP to another machine.

    Raises:
        ConfigError: the URL or the token is malformed.
        InsecureTransport: the token would travel over plain HTTP to a host that is no loopback literal.
        DaemonUnreachable: a daemon had to be started and did not.
    """
    client = Client(find_endpoint(url, token, allow_insecure_http=allow_insecure_http))
    if is_wanted(url):
        client._start_daemon()
    return client


class Client:
    """One daemon. Made by `connect`; several threads may use one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._transport = SyncTransport(endpoint)
        self._run = self._transport.run
        self._daemon: SpawnedDaemon | None = None

    def __repr__(self) -> str:
        return f"<drums.Client of {self.url!r}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The daemon's address."""
        return self._transport.endpoint.url

    def close(self) -> None:
        """Close the connections, and end a daemon that was started for this client. Desktops of others live on."""
        self._transport.close()
        if self._daemon is not None:
            self._run(self._daemon.stopped())

    def _start_daemon(self) -> None:
        self._daemon = SpawnedDaemon()
        try:
            self._transport.endpoint = self._run(self._daemon.ready())
        except BaseException:
            self.close()
            raise

    def health(self) -> Document:
        """The daemon's `status` and `version`; with the right token also its slots."""
        return self._run(_calls.get("/v1/health"))

    def tasks(self) -> list[Document]:
        """Every task that is served: `id`, `domain`, `instruction`, `supported`, `evaluator`, `config`, …"""
        return self._run(_calls.listing("/v1/tasks", "tasks"))

    def broken_tasks(self) -> dict[str, str]:
        """The task files that cannot be served, each with the reason."""
        return self._run(_calls.broken_tasks())

    def task(self, prefix: str) -> Document:
        """One task, by its id or a unique prefix of 8 or more characters.

        Raises:
            TaskNotFound: none has it.
            DrumsError: several have it; its `code` is `task_ambiguous`.
        """
        return self._run(_calls.task(prefix))

    def create(
        self,
        task: str | None = None,
        image: str | None = None,
        checkpoint: str | None = None,
        ttl: float | Default | None = Default.TTL,
        network: str = "none",
        labels: Mapping[str, str] | None = None,
    ) -> Env:
        """A new desktop with the task set up; a context manager that closes it.

        Args:
            task: a task's id or unique prefix; None is a desktop without a task (a checkpoint brings its own).
            image: the image to start from; the host's default otherwise.
            checkpoint: a saved checkpoint to start from, in place of an image.
            ttl: seconds until the desktop is closed; None is never, where the host allows it.
            network: what the desktop can reach.
            labels: up to 16 texts by name that the journal keeps with its episodes and its children's, and that `stats`
                groups by: `{"policy": "run-7/step-400"}`. The name `drums` is drums' own.

        Raises:
            TaskNotFound, TaskUnsupported, ImageUnsuitable, VerifierNotFound, CapacityExhausted: nothing was started.
            SetupFailed, RestoreError: nothing is left.
        """
        return self._env(self._run(_calls.create(task, image, checkpoint, ttl, network, labels)))

    def slots(self) -> list[Document]:
        """Every slot of the host."""
        return self._run(_calls.listing("/v1/slots", "slots"))

    def slot(self, id: str) -> Env:
        """A desktop that is there already.

        Raises:
            SlotNotFound: there is none.
        """
        return self._env(self._run(_calls.describe(id)))

    def checkpoints(self) -> list[Document]:
        """The saved checkpoints, the images' golden ones and the kept end states, by `kind`."""
        return self._run(_calls.listing("/v1/checkpoints", "checkpoints"))

    def episodes(self, limit: int | None = None, before: str | None = None) -> list[Document]:
        """Episodes of the host's journal, newest first; `before` is the id of the last one seen."""
        return self._run(_calls.episodes(limit, before))

    def episode(self, id: str) -> Document:
        """One episode of the journal, with gates, rewards and quarantines."""
        return self._run(_calls.episode(id))

    def reverify(self, id: str, *, anyway: bool = False) -> Document:
        """Grade the end state of an episode again, which `verify(keep=True)` has kept, and compare.

        Args:
            id: the episode.
            anyway: grade also when the task's checker, its version or its files are not those of the first time.

        Returns:
            `agree`, the grades `recorded` and `again` (each with `score` and `checker_error`), `checkpoint`,
            `differences` of what graded, and `thawed`.

        Raises:
            EpisodeNotFound, EndStateNotFound, CheckerChanged, VerifierNotFound, CheckpointError.
        """
        return self._run(_calls.reverify(id, anyway))

    def stats(
        self, by: str = "both", label: str = "policy", since: float | None = None, *, all: bool = False
    ) -> list[Document]:
        """How episodes came out, a row per group: verdicts, failed gates with their causes, scores, checker errors.

        Args:
            by: `task`, `label`, or `both`: a row per pair.
            label: the label whose values make the groups.
            since: only episodes that began at this time (seconds since the epoch) or later.
            all: also the episodes that drums made itself, for its self-test, its demo and trials of verifiers.
        """
        return self._run(_calls.stats(by, label, since, all))

    def plugins(self) -> list[Document]:
        """The host's plugins, and what is wrong with those not in use."""
        return self._run(_calls.listing("/v1/plugins", "plugins"))

    def reload_plugins(self) -> list[Document]:
        """Look for verifiers anew; as `plugins`, which tells what else has changed since the daemon began."""
        return self._run(_calls.reload_plugins())

    def images(self) -> list[Document]:
        """The host's images."""
        return self._run(_calls.listing("/v1/images", "images"))

    def _env(self, slot: Document) -> Env:
        return Env(self._transport, slot)


class Env(SlotView):
    """One desktop. Made by `Client.create`, `Client.slot` and `fork`; use it as a context manager, which closes it."""

    def __init__(self, transport: SyncTransport, slot: Document) -> None:
        super().__init__(slot)
        self._transport = transport
        self._run = transport.run

    def __enter__(self) -> Env:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DrumsError as e:
            note_failed_close(error, f"desktop {self.id}", e)

    def refresh(self) -> Document:
        """The slot as it is now: state, reason, verdict, lease and so on."""
        self._learn(self._run(_calls.describe(self.id)))
        return dict(self._slot)

    def wait_valid(self, timeout: float | None = None) -> None:
        """Return once every gate has passed.

        Raises:
            InvalidEpisode: one failed; `.bad_gates`, `.invalid_reasons` and `.report` say which and why.
            TimeoutError: the verdict is still pending after `timeout` seconds.
        """
        self._run(_calls.wait_valid(self.id, timeout))

    def gates(self) -> Document:
        """The gate report: `{"gates": {"gates": [{"gate", "status", …}, …]}, "validity": {"verdict", …}, …}`."""
        return self._run(_calls.gates(self.id))

    def screenshot(self) -> bytes:
        """The screen as PNG."""
        return self._run(_calls.screenshot(self.id))

    def accessibility(self) -> str:
        """The accessibility tree as XML."""
        return self._run(_calls.accessibility(self.id))

    def step(self, action: str) -> Document:
        """One action: a string of pyautogui code, or WAIT, DONE or FAIL.

        Returns:
            `status`, `output`, `error` and `returncode` of the code.

        Raises:
            SlotQuarantined, SlotBusy, InvalidTransition, GuestError.
        """
        return self._run(_calls.step(self.id, action))

    def execute(self, command: str | Sequence[str], shell: bool = False, timeout: float = 120) -> Document:
        """A command as the desktop's user, to its end: `returncode`, `output` and `error`."""
        return self._run(_calls.execute(self.id, command, shell, timeout))

    def read_file(self, path: str) -> bytes:
        """A file of the desktop, as its user may read it.

        Raises:
            DrumsError: there is none; its `code` is `file_not_found`.
        """
        return self._run(_calls.read_file(self.id, path))

    def write_file(self, path: str, data: bytes) -> None:
        """Write a file as the desktop's user."""
        self._run(_calls.write_file(self.id, path, data))

    def reset(self) -> None:
        """Go back to the checkpoint that the create started from and set the task up again: a new episode."""
        self._learn(self._run(_calls.operate(self.id, "reset", is_long=True)))

    def fork(self, n: int = 1) -> list[Env]:
        """`n` desktops that go on from here, each with an episode of its own; this one runs on."""
        return [Env(self._transport, slot) for slot in self._run(_calls.fork(self.id, n))]

    def save(self, name: str) -> Document:
        """Keep the desktop's state under a name, for `create(checkpoint=name)`."""
        return self._run(_calls.save(self.id, name))

    def quarantine(self, reason: str) -> None:
        """Mark the episode as broken: it is invalid, and the desktop takes no more steps."""
        self._learn(self._run(_calls.operate(self.id, "quarantine", {"reason": reason})))

    def release(self) -> None:
        """End a quarantined desktop; the slot is down, and `reset` begins a new episode."""
        self._learn(self._run(_calls.operate(self.id, "release")))

    def extend(self, ttl: float | None) -> None:
        """Let the lease end `ttl` seconds from now; None is never, where the host allows it."""
        self._learn(self._run(_calls.operate(self.id, "extend", {"ttl": ttl})))

    def verify(self, strict: bool = True, *, in_place: bool | None = None, keep: bool | None = None) -> Reward:
        """Wait for the verdict, run the task's checker on a frozen copy of the desktop, and return the reward.

        Args:
            strict: raise instead of returning a reward that is not valid, or that has no score.
            in_place: run the checker on the desktop itself, while its programs run; None is as the host is configured.
            keep: let the host keep the copy as the episode's end state, for `Client.reverify`; None likewise.

        Raises:
            InvalidEpisode: the reward is not valid; it rides along as `.reward`.
            CheckerError: it is valid, and the checker failed; the reward rides along.
        """
        return self._run(_calls.verify(self.id, strict, in_place, keep))

    def close(self) -> None:
        """End the desktop and the slot; twice is once."""
        if not self._closed:
            self._run(_calls.close(self.id))
            self._end()
