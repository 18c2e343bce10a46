"""The journal's file: its tables, the versions of them that there have been, and reading it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from drums.errors import DrumsError, PrerequisiteError

FILE = "journal.sqlite"
VERSION = 2
_APPLICATION_ID = 0x6472756D  # "drum"
BUSY_S = 10.0
_SCHEMA = """
CREATE TABLE hosts (
    instance TEXT PRIMARY KEY, pid INTEGER NOT NULL, opened_at REAL NOT NULL, closed_at REAL
);
CREATE TABLE episodes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    host TEXT NOT NULL REFERENCES hosts (instance),
    slot TEXT NOT NULL, origin TEXT NOT NULL, task TEXT, task_sha256 TEXT, image TEXT NOT NULL,
    image_digest TEXT NOT NULL, checkpoint TEXT NOT NULL, started_at REAL NOT NULL, ended_at REAL,
    verdict TEXT NOT NULL, bad_gates TEXT NOT NULL, invalid_reasons TEXT NOT NULL, causes TEXT NOT NULL,
    labels TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX episodes_open ON episodes (host) WHERE ended_at IS NULL;
CREATE TABLE gate_results (
    episode TEXT NOT NULL REFERENCES episodes (id), position INTEGER NOT NULL, gate TEXT NOT NULL,
    status TEXT NOT NULL, phase TEXT NOT NULL, plugin TEXT NOT NULL, reason TEXT NOT NULL, cause TEXT,
    observed TEXT NOT NULL, expected TEXT NOT NULL, duration_ms REAL NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (episode, position)
);
CREATE TABLE quarantines (
    number INTEGER PRIMARY KEY, episode TEXT NOT NULL REFERENCES episodes (id), reason TEXT NOT NULL,
    by_user INTEGER NOT NULL, at REAL NOT NULL
);
CREATE INDEX quarantines_of ON quarantines (episode);
CREATE TABLE rewards (
    number INTEGER PRIMARY KEY, episode TEXT NOT NULL REFERENCES episodes (id), score REAL, valid INTEGER NOT NULL,
    verdict TEXT NOT NULL, reward TEXT NOT NULL, at REAL NOT NULL
);
CREATE INDEX rewards_of ON rewards (episode);
"""
_MIGRATIONS: Mapping[int, str] = {1: "ALTER TABLE episodes ADD COLUMN labels TEXT NOT NULL DEFAULT '{}'"}
"""SQL that takes a file from this version to the next."""
_READ_AS_NEXT: Mapping[int, str] = {1: "CREATE TEMP VIEW episodes AS SELECT *, '{}' AS labels FROM main.episodes"}
"""SQL that shows a reader, who may not write, a file of this version as one of the next."""


class JournalError(DrumsError):
    """The journal cannot be written or read: what would be answered is not on disk, so it is not answered."""

    code = "journal_error"
    status = 500


def bring_up_to_date(db: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new file, or those of an older version anew; raises `PrerequisiteError` for a newer one."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise PrerequisiteError(
            f"journal {str(path)!r} has version {version}, this drums reads up to {VERSION}",
            hint="use the newer drums, or move the file away to begin a new one",
        )
    if version == 0:
        for statement in _SCHEMA.split(";\n"):
            db.execute(statement)
    else:
        for step in range(version, VERSION):
            db.execute(_MIGRATIONS[step])
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")


def remedy(error: BaseException) -> str:
    """What to do about an error of the file's; empty where nothing is known."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without what SQLite adds to its kind
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return "stop the daemon and move the file away, with its -wal and -shm files: the daemon then makes a new one"
    if code == sqlite3.SQLITE_FULL:
        return "free space on its file system"
    if code == sqlite3.SQLITE_IOERR:
        return "see whether its file system is full, or broken"
    refused = code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
    if isinstance(error, PermissionError) or (refused and os.geteuid() != 0):
        return "it is root's: run it with sudo"
    return ""


@contextmanager
def reading(state_dir: Path) -> Iterator[sqlite3.Connection | None]:
    """A connection that cannot write; None where there is no journal yet."""
    path = state_dir / FILE
    try:
        found = path.exists()
    except OSError as e:
        raise JournalError(f"journal {str(path)!r} cannot be read: {e}", hint=remedy(e), path=str(path)) from e
    if not found:
        yield None
        return
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True, timeout=BUSY_S, check_same_thread=False)
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute("BEGIN")  # one state of the file, whatever a host writes, or brings up to date, meanwhile
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise PrerequisiteError(f"journal {str(path)!r} has version {version}, this drums reads up to {VERSION}")
        for step in range(max(version, 1), VERSION):
            db.execute(_READ_AS_NEXT[step])
        yield None if version == 0 else db
    except sqlite3.Error as e:
        raise JournalError(f"journal {str(path)!r} cannot be read: {e}", hint=remedy(e), path=str(path)) from e
    finally:
        if db is not None:
            db.close()
