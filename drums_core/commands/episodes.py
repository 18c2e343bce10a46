"""`drums episodes`: what the journal has, read from its file, and end states graded again: no daemon is needed."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click
import trio

from drums.errors import DrumsError
from drums_core.commands.output import print_json, print_table
from drums_core.config import load_config
from drums_core.journal import read_episode, read_episodes
from drums_core.logs import configure_logging
from drums_core.opening import open_host
from drums_core.reverifying import Reverification


@click.group()
def episodes() -> None:
    """List and show the episodes of this host, with their verdicts and rewards, and grade their end states again.

    \b
    sudo drums episodes ls --limit 20
    sudo drums episodes show e-0123456789abcdef --json
    sudo drums episodes reverify e-0123456789abcdef
    """


def _when(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _score(score: float | None) -> str:
    return "-" if score is None else f"{score:g}"


def _not_there(identity: str) -> DrumsError:
    return DrumsError(f"no episode {identity!r} in {str(load_config().state_dir)!r}", hint="see drums episodes ls")


@episodes.command()
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many at most.")
@click.option("--before", help="Only episodes older than this one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def ls(limit: int, before: str | None, as_json: bool) -> None:
    """List episodes, newest first.

    \b
    sudo drums episodes ls --json
    """
    try:
        found = read_episodes(load_config().state_dir, limit=limit, before=before)
    except LookupError as e:
        raise _not_there(str(before)) from e
    if as_json:
        print_json({"episodes": found})
        return
    rows = [
        [
            e["id"],
            _when(e["started_at"]),
            e["origin"],
            (e["task"] or "-")[:13],
            e["verdict"],
            _score(e["score"]),
            _why(e),
        ]
        for e in found
    ]
    print_table("episodes", ["episode", "started", "origin", "task", "verdict", "score", "failed gates"], rows)


def _why(episode: dict[str, Any]) -> str:
    return ", ".join(episode["bad_gates"]) or "-"


@episodes.command()
@click.argument("episode")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all that was observed.")
def show(episode: str, as_json: bool) -> None:
    """Show one EPISODE with its gates, quarantines and rewards, and what each reward rests on.

    \b
    sudo drums episodes show e-0123456789abcdef
    """
    try:
        found = read_episode(load_config().state_dir, episode)
    except LookupError as e:
        raise _not_there(episode) from e
    if as_json:
        print_json(found)
        return
    facts = ("id", "slot", "origin", "task", "image", "checkpoint", "verdict")
    rows = [[name, str(found[name] or "-")] for name in facts]
    rows += [["started", _when(found["started_at"])], ["ended", _when(found["ended_at"])]]
    rows += [[f"label {name}", value] for name, value in found["labels"].items()]
    rows += [["invalid", reason] for reason in found["invalid_reasons"]]
    rows += [["quarantined", q["reason"]] for q in found["quarantines"]]
    rows += [
        [
            "reward",
            f"score {_score(r['score'])}, {r['verdict']}, {r['checker_error'] or r['checker_skipped'] or 'scored'}",
        ]
        for r in found["rewards"]
    ]
    print_table("episode", ["what", "value"], rows)
    gates = [[g["gate"], g["status"], g["phase"], g["reason"]] for g in found["gates"]]
    print_table("gates", ["gate", "status", "phase", "reason"], gates)
    for number, reward in enumerate(found["rewards"], 1):
        title = f"reward {number} of {len(found['rewards'])}"
        print_table(title, ["what", "value"], [["at", _when(reward["at"])], *_flat(reward, without=("at",))])


def _flat(document: dict[str, Any], prefix: str = "", without: tuple[str, ...] = ()) -> list[list[str]]:
    """A row for each value in a document, named by its path."""
    rows = []
    for key, value in document.items():
        if key in without or value in (None, [], {}):
            continue
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and all(isinstance(x, dict) for x in value):
            for index, part in enumerate(value):
                rows += _flat(part, f"{prefix}{key}[{index}].")
        else:
            rows.append([prefix + key, value if isinstance(value, str) else json.dumps(value)])
    return rows


@episodes.command()
@click.argument("episode")
@click.option("--anyway", is_flag=True, help="Grade although the checker is not what it was, and say what differs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with both grades.")
def reverify(episode: str, anyway: bool, as_json: bool) -> None:
    """Grade the end state of an EPISODE again, which `drums verify --keep` has kept, and compare the scores.

    The end state is restored, judged by the gates, and graded by what graded it the first time: another version of the
    checker, or other files, are refused. Exit code 0: the scores agree; 1: they differ; 2: it cannot be graded.

    \b
    sudo drums episodes reverify e-0123456789abcdef
    sudo drums episodes reverify e-0123456789abcdef --json | jq .agree
    """
    configure_logging()

    async def run() -> Reverification:
        async with open_host(load_config()) as host:
            return await host.reverify(episode, anyway=anyway)

    try:
        found = trio.run(run)
    except DrumsError as e:
        click.echo(f"drums: {e}", err=True)
        sys.exit(2)
    if as_json:
        print_json(found.to_dict())
    else:
        grades = (("recorded", found.recorded), ("again", found.again))
        rows = [[what, _score(g.score), _when(g.at), g.checker_error or "-"] for what, g in grades]
        print_table("reverify", ["grade", "score", "at", "error"], rows)
        for difference in found.differences:
            click.echo(f"not what graded it before: {difference}", err=True)
        click.echo("they agree" if found.agree else "they differ")
    sys.exit(0 if found.agree else 1)
