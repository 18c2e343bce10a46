"""What lasts: episodes, gate results, quarantines and rewards, in one SQLite file per state folder.

Written by one task in groups, each group one transaction that is on disk (`synchronous=FULL`) before anybody who waits
for it goes on. Several hosts may have the file open; each episode belongs to one of them. What a host that ended
without its clean-up left open is marked invalid by the next one that opens: nobody watched its end.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import structlog
import trio

from drums.reward import Reward, Verdict
from drums_core.durable import take_lock
from drums_core.episode import Episode
from drums_core.journal_file import BUSY_S, FILE, JournalError, bring_up_to_date, reading, remedy
from drums_core.model import Cause, GateResult, Json, Phase, Status, Validity

_log = structlog.get_logger("drums.journal")
ALIVE = "alive.lock"
"""A host holds this file of its runtime folder for as long as it lives."""

NOT_WATCHED = "not watched: the host ended"


@attrs.frozen
class _Write:
    """One statement of a group. One that may be `dropped` is not tried again when its group could not be written."""

    sql: str
    values: tuple[Any, ...]
    dropped: bool = False


@attrs.define(eq=False)
class _Waiter:
    done: trio.Event = attrs.field(factory=trio.Event)
    error: BaseException | None = None


@attrs.define(eq=False)
class Journal:
    """The journal of one open host. Made by `open_journal`; `run` writes, and must run until `close`."""

    path: Path
    instance: str
    _db: sqlite3.Connection
    _queue: list[_Write | _Waiter] = attrs.field(factory=list)
    _writing: bool = False
    _wake: trio.Event = attrs.field(factory=trio.Event)
    _one_thread: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))
    _recorded: weakref.WeakKeyDictionary[Episode, int] = attrs.field(factory=weakref.WeakKeyDictionary)

    # --- what is recorded; none of these blocks, and what they record is on disk once `flush` returns

    def episode_started(self, episode: Episode, *, task_sha256: str | None, image: tuple[str, str], base: str) -> None:
        """An episode begins.

        Args:
            image: its name and digest.
            base: the checkpoint that is restored.
        """
        self._recorded[episode] = 0
        self._add(
            "INSERT INTO episodes (id, host, slot, origin, task, task_sha256, image, image_digest, checkpoint,"
            " started_at, verdict, labels, bad_gates, invalid_reasons, causes)"
            " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,'[]','[]','[]')",
            episode.id,
            self.instance,
            episode.slot,
            episode.origin,
            episode.task,
            task_sha256,
            *image,
            base,
            episode.started_at,
            episode.validity.verdict.value,
            _json(dict(episode.labels)),
        )

    def judged(self, episode: Episode, validity: Validity) -> None:
        """An episode's verdict, or what it rests on, has changed."""
        self._add_results(episode)
        self._add(*_verdict_of(episode.id, validity))

    def episode_ended(self, episode: Episode) -> None:
        """An episode's desktop ends."""
        self._add_results(episode)
        self._add("UPDATE episodes SET ended_at = ? WHERE id = ?", time.time(), episode.id)

    def quarantined(self, episode: Episode, reason: str, by_user: bool) -> None:
        """An episode's desktop was quarantined."""
        self._add(
            "INSERT INTO quarantines (episode, reason, by_user, at) VALUES (?,?,?,?)",
            episode.id,
            reason,
            int(by_user),
            time.time(),
        )

    async def record_reward(self, episode: Episode, reward: Reward) -> None:
        """Record a reward, with every result and verdict before it; on disk when this returns.

        Raises:
            JournalError: it could not be written, and is not answered.
        """
        self._add_results(episode)
        self._add(
            "INSERT INTO rewards (episode, score, valid, verdict, reward, at) VALUES (?,?,?,?,?,?)",
            episode.id,
            reward.score,
            int(reward.valid),
            reward.verdict.value,
            _json(reward.to_dict()),
            time.time(),
            dropped=True,
        )
        await self.flush()

    async def flush(self) -> None:
        """Return once all that was recorded so far is on disk.

        Raises:
            JournalError: it could not be written; rewards apart, it is tried again with whatever comes next.
        """
        if not self._queue and not self._writing:
            return
        waiter = _Waiter()
        self._queue.append(waiter)
        self._wake.set()
        await waiter.done.wait()
        if waiter.error is not None:
            raise JournalError(
                f"journal {str(self.path)!r} cannot be written: {waiter.error}",
                hint=remedy(waiter.error),
                path=str(self.path),
            ) from waiter.error

    def _add_results(self, episode: Episode) -> None:
        begin = self._recorded.get(episode, 0)
        for position, result in enumerate(episode.results[begin:], begin):
            self._add(*_result_row(episode.id, position, result))
        self._recorded[episode] = len(episode.results)

    def _add(self, sql: str, *values: Any, dropped: bool = False) -> None:
        self._queue.append(_Write(sql, tuple(_storable(v) for v in values), dropped))
        self._wake.set()

    # --- writing

    async def run(self) -> None:
        """Write what is recorded, as it comes."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            group, self._queue = self._queue, []
            waiters = [x for x in group if isinstance(x, _Waiter)]
            writes = [x for x in group if isinstance(x, _Write)]
            error: BaseException | None = None
            self._writing = True
            try:
                await trio.to_thread.run_sync(self._write, writes, limiter=self._one_thread)
            except sqlite3.OperationalError as e:  # full, locked, not there: another time it may do
                error = e
                _log.error("the journal cannot be written", path=str(self.path), error=str(e))
                self._queue[:0] = [w for w in writes if not w.dropped]
            except Exception as e:  # noqa: BLE001 - the waiters are told; the group's other rows must not be lost with it
                error = e
                _log.exception("a row cannot be written to the journal", path=str(self.path))
                await trio.to_thread.run_sync(self._write_each, writes, limiter=self._one_thread)
            finally:
                self._writing = False
            for waiter in waiters:
                waiter.error = error
                waiter.done.set()

    def _write(self, writes: Sequence[_Write]) -> None:
        if not writes:
            return
        with _transaction(self._db):
            for write in writes:
                self._db.execute(write.sql, write.values)

    def _write_each(self, writes: Sequence[_Write]) -> None:
        for write in writes:
            try:
                self._write([write])
            except Exception:  # noqa: BLE001 - whoever waited has been told
                _log.exception("a row is not in the journal", path=str(self.path), sql=write.sql)

    def close(self) -> None:
        """Record that this host ended in order, and close the file. Blocks; `run` has ended."""
        left = [x for x in self._queue if isinstance(x, _Write) and not x.dropped]
        try:
            self._write(
                [*left, _Write("UPDATE hosts SET closed_at = ? WHERE instance = ?", (time.time(), self.instance))]
            )
        except sqlite3.Error as e:
            _log.error("the journal cannot be written", path=str(self.path), error=str(e))
        finally:
            self._db.close()


def open_journal(state_dir: Path, instance: str) -> Journal:
    """Open the journal of a state folder for a host, and close what hosts that are gone left open in it. Blocks.

    The host holds the `ALIVE` file of its runtime folder from before this until it ends.

    Raises:
        PrerequisiteError: the file is of a newer drums.
        JournalError: it cannot be used.
    """
    path = state_dir / FILE
    try:
        # Only SQLite may open this file: closing any descriptor of it takes the process's locks on it away, and with
        # them those of every other host in this process (sqlite.org/howtocorrupt.html, 2.2). `mknod` opens nothing.
        with suppress(FileExistsError):
            os.mknod(path, stat.S_IFREG | 0o600)
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError("it is no regular file")
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as e:
        raise JournalError(f"journal {str(path)!r} cannot be opened: {e}", hint=remedy(e), path=str(path)) from e
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        with _transaction(db):
            bring_up_to_date(db, path)
            db.execute(
                "INSERT INTO hosts (instance, pid, opened_at) VALUES (?,?,?)", (instance, os.getpid(), time.time())
            )
            _close_lost(db, lambda other: other == instance or _is_alive(state_dir / "run" / other))
    except sqlite3.Error as e:
        db.close()
        raise JournalError(f"journal {str(path)!r} cannot be used: {e}", hint=remedy(e), path=str(path)) from e
    except BaseException:
        db.close()
        raise
    return Journal(path, instance, db)


def _is_alive(runtime: Path) -> bool:
    """Whether the host with this runtime folder lives: it holds a lock in it."""
    try:
        os.close(take_lock(runtime / ALIVE))
    except BlockingIOError:
        return True
    except OSError:
        return False  # its folder went with it
    return False


def _close_lost(db: sqlite3.Connection, is_alive: Callable[[str], bool]) -> None:
    """Mark the open episodes of hosts that are gone as ended and invalid."""
    open_hosts = [x for (x,) in db.execute("SELECT instance FROM hosts WHERE closed_at IS NULL")]
    now = time.time()
    for host in [x for x in open_hosts if not is_alive(x)]:
        rows = db.execute(
            "SELECT id, bad_gates, invalid_reasons, causes FROM episodes WHERE host = ? AND ended_at IS NULL", (host,)
        ).fetchall()
        for episode, bad_gates, reasons, causes in rows:
            (position,) = db.execute(
                "SELECT coalesce(max(position) + 1, 0) FROM gate_results WHERE episode = ?", (episode,)
            ).fetchone()
            result = {"gate": "watched", "status": Status.FAIL, "phase": Phase.EVENT, "reason": NOT_WATCHED}
            db.execute(
                "INSERT INTO gate_results VALUES (:episode,:position,:gate,:status,:phase,:plugin,:reason,:cause,"
                "'null','null',0,:at)",
                {
                    **result,
                    "episode": episode,
                    "position": position,
                    "plugin": _json({"name": "journal", "distribution": "drums", "version": ""}),
                    "cause": Cause.INFRASTRUCTURE,
                    "at": now,
                },
            )
            validity = Validity(
                Verdict.INVALID,
                bad_gates=(*json.loads(bad_gates), "watched"),
                invalid_reasons=(*json.loads(reasons), f"watched: {NOT_WATCHED}"),
                causes=tuple(dict.fromkeys([*(Cause(x) for x in json.loads(causes)), Cause.INFRASTRUCTURE])),
            )
            sql, *values = _verdict_of(episode, validity)
            db.execute(sql, values)
            db.execute("UPDATE episodes SET ended_at = ? WHERE id = ?", (now, episode))
        db.execute("UPDATE hosts SET closed_at = ? WHERE instance = ?", (now, host))
        if rows:
            _log.warning("episodes of a host that ended are marked invalid", host=host, episodes=len(rows))


def _verdict_of(episode: str, validity: Validity) -> tuple[Any, ...]:
    return (
        "UPDATE episodes SET verdict = ?, bad_gates = ?, invalid_reasons = ?, causes = ? WHERE id = ?",
        validity.verdict.value,
        _json(validity.bad_gates),
        _json(validity.invalid_reasons),
        _json([c.value for c in validity.causes]),
        episode,
    )


def _result_row(episode: str, position: int, result: GateResult) -> tuple[Any, ...]:
    return (
        "INSERT INTO gate_results VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
        episode,
        position,
        result.gate,
        result.status.value,
        result.phase.value,
        _json(attrs.asdict(result.plugin)),
        result.reason,
        result.cause.value if result.cause else None,
        _json(result.observed),
        _json(result.expected),
        result.duration_ms,
        time.time(),
    )


def _json(document: Json) -> str:
    # A gate of somebody else's may have observed what JSON does not have; its result counts all the same.
    return json.dumps(document, default=repr)


def _storable(value: Any) -> Any:
    # SQLite takes text as UTF-8, which has no lone surrogates; file names of a desktop may bring some.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


# --- reading

_EPISODE = (
    "id, host, slot, origin, task, task_sha256, image, image_digest, checkpoint, started_at, ended_at, verdict,"
    " bad_gates, invalid_reasons, causes, labels"
)
_DOCUMENTS = ("bad_gates", "invalid_reasons", "causes", "labels")


def read_episodes(state_dir: Path, *, limit: int = 100, before: str | None = None) -> list[dict[str, Json]]:
    """Episodes, newest first. Blocks.

    Args:
        limit: how many at most.
        before: an episode's id; only older ones are read.

    Raises:
        LookupError: there is no episode `before`.
        JournalError: the journal cannot be read.
    """
    with reading(state_dir) as db:
        if db is None:
            if before is not None:
                raise LookupError(before)
            return []
        number = None
        if before is not None:
            row = db.execute("SELECT number FROM episodes WHERE id = ?", (before,)).fetchone()
            if row is None:
                raise LookupError(before)
            number = row["number"]
        rows = db.execute(
            f"SELECT {_EPISODE}, (SELECT score FROM rewards WHERE episode = episodes.id ORDER BY number DESC LIMIT 1)"
            " AS score FROM episodes WHERE ? IS NULL OR number < ? ORDER BY number DESC LIMIT ?",
            (number, number, limit),
        )
        return [_decoded(row, *_DOCUMENTS) for row in rows]


def read_episode(state_dir: Path, identity: str) -> dict[str, Json]:
    """One episode with its gate results, quarantines and rewards, each in the order in which they came. Blocks.

    Raises:
        LookupError: there is none with this id.
        JournalError: the journal cannot be read.
    """
    with reading(state_dir) as db:
        row = (
            None if db is None else db.execute(f"SELECT {_EPISODE} FROM episodes WHERE id = ?", (identity,)).fetchone()
        )
        if db is None or row is None:
            raise LookupError(identity)
        episode = _decoded(row, *_DOCUMENTS)
        results = db.execute("SELECT * FROM gate_results WHERE episode = ? ORDER BY position", (identity,))
        episode["gates"] = [
            _decoded(r, "plugin", "observed", "expected", without=("episode", "position")) for r in results
        ]
        quarantines = db.execute(
            "SELECT reason, by_user, at FROM quarantines WHERE episode = ? ORDER BY number", (identity,)
        )
        episode["quarantines"] = [{**dict(q), "by_user": bool(q["by_user"])} for q in quarantines]
        rewards = db.execute("SELECT reward, at FROM rewards WHERE episode = ? ORDER BY number", (identity,))
        # Rewards of earlier versions have no cause.
        episode["rewards"] = [{"checker_error_cause": None, **json.loads(r["reward"]), "at": r["at"]} for r in rewards]
        return episode


def _decoded(row: sqlite3.Row, *columns: str, without: Sequence[str] = ()) -> dict[str, Json]:
    return {k: json.loads(row[k]) if k in columns else row[k] for k in row.keys() if k not in without}  # noqa: SIM118
