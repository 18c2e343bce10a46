"""`drums gates`: which gates there are, and the proof on this host that they see what they are there to see."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
import trio

from drums_core.commands.output import print_json, print_table, progress_bar
from drums_core.config import load_config
from drums_core.error_groups import first_error
from drums_core.gating import GateSet
from drums_core.logs import configure_logging
from drums_core.plugins import build_manager
from drums_core.selftest.run import AT_ONCE, Findings, all_faults, selftest


@click.group()
def gates() -> None:
    """The gates that decide whether an episode is valid, and their proof.

    \b
    sudo drums gates ls
    sudo drums gates selftest netns state_hash
    """


@gates.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print the gates as JSON.")
def list_gates(as_json: bool) -> None:
    """List the gates with their phase, their package, and how many faults show that they see something.

    \b
    drums gates ls
    drums gates ls --json
    """
    plugins = build_manager()
    config = load_config()
    faults = all_faults(plugins).values()
    found = GateSet.build(plugins.registry, timeout_s=config.gate_timeout_s, extra_required=config.extra_required_gates)
    rows = [
        {
            "gate": name,
            "phase": phase.value,
            "required": name in found.required,
            "package": f"{plugin.distribution} {plugin.version}",
            "faults": sum(1 for x in faults if name in x.gates),
        }
        for name, phase, plugin in found.listing()
    ]
    if as_json:
        print_json({"gates": rows})
        return
    columns = ["gate", "phase", "required", "package", "faults"]
    print_table("gates", columns, [[str(row[column]) for column in columns] for row in rows])


@gates.command("selftest")
@click.argument("gate", nargs=-1)
@click.option("--clean", type=click.IntRange(min=0), default=20, show_default=True, help="How many clean restores.")
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=AT_ONCE,
    show_default=True,
    help="How many desktops live at once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: planted, caught, missed, clean, ...")
def selftest_command(gate: Sequence[str], clean: int, at_once: int, as_json: bool) -> None:
    """Plant every fault of the matrix in throw-away desktops, and restore cleanly; say what the gates saw.

    With GATE, only the faults of these gates, those of plugins included. A daemon that runs on this host is not
    disturbed, but shares its processors and memory; the episodes are in the journal, as any others. Exit code 1 when a
    gate missed a fault, or flagged a desktop that had none.

    \b
    sudo drums gates selftest
    sudo drums gates selftest netns state_hash --clean 0
    sudo drums gates selftest --clean 1000 --json
    """
    configure_logging()
    began = time.monotonic()
    try:
        with progress_bar("gates") as progress:
            found = trio.run(
                lambda: selftest(load_config(), gates=gate, clean=clean, at_once=at_once, progress=progress)
            )
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    if as_json:
        print_json(found.document())
    else:
        _print(found, time.monotonic() - began)
    if not found.good:
        raise SystemExit(1)


def _print(found: Findings, seconds: float) -> None:
    document = found.document()
    rows = [
        [x.fault.name, ", ".join(sorted(x.failing)) or "-", _state(x.misses(), x.false_alarms(), x.skipped)]
        for x in found.trials
    ]
    print_table("faults", ["fault", "caught by", "outcome"], rows)
    for trial in found.trials:
        for text in trial.misses():
            click.echo(f"missed: {trial.fault.name} ({trial.fault.about}): {text}")
        for text in trial.false_alarms():
            click.echo(f"false alarm: {trial.fault.name} ({trial.fault.about}): {text}")
        if trial.skipped:
            click.echo(f"not on this host: {trial.fault.name}: {trial.problem}")
    for alarm in found.clean.alarms:
        click.echo(f"false alarm: {alarm['origin']}: {'; '.join(alarm['reasons']) or alarm['verdict']}")
    click.echo(
        f"{document['planted']} faults planted, {document['caught']} caught, {len(document['missed'])} missed; "
        f"{document['harmless']} harmless acts, {document['clean']} clean restores, "
        f"{document['false_alarms']} false alarms; {seconds:.0f} s"
    )


def _state(misses: Sequence[str], false_alarms: Sequence[str], skipped: bool) -> str:
    if skipped:
        return "not on this host"
    return "MISSED" if misses else "FALSE ALARM" if false_alarms else "as it must"
