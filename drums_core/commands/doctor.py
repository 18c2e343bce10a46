"""`drums doctor`: what this host can do and lacks, each with the command that mends it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from drums_core.config import DEFAULT_STATE_DIR
from drums_core.criu_provider import install_criu
from drums_core.doctor import Diagnosis, diagnose
from drums_core.doctor.diagnose import require_root


@click.command()
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_STATE_DIR,
    envvar="DRUMS_STATE_DIR",
    show_default=True,
    help="Where drums keeps images, checkpoints and its CRIU.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--install-criu", is_flag=True, help="First find or install a CRIU that works here.")
def doctor(state_dir: Path, as_json: bool, install_criu: bool) -> None:
    """Try what desktops need on this host; exit code 1 when a needed thing is missing.

    \b
    sudo drums doctor
    sudo drums doctor --install-criu
    sudo drums doctor --json
    """
    require_root()
    if install_criu:
        _install(state_dir)
    diagnosis = diagnose(state_dir)
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), indent=1))
    elif sys.stdout.isatty():
        _print_table(diagnosis)
    else:
        _print_plain(diagnosis)
    if not diagnosis.ok:
        click.get_current_context().exit(1)


def _install(state_dir: Path) -> None:
    install_criu(state_dir, lambda line: click.echo(line, err=True))


def _summary(diagnosis: Diagnosis) -> str:
    missing = [finding.name for finding in diagnosis.findings if finding.mark == "missing"]
    return f"missing: {', '.join(missing)}" if missing else "this host can run desktops"


def _print_plain(diagnosis: Diagnosis) -> None:
    for finding in diagnosis.findings:
        click.echo(f"{finding.mark:8}{finding.name:18}{finding.observed}")
        if not finding.ok:
            click.echo(f"{'':26}wanted: {finding.wanted}")
            click.echo(f"{'':26}remedy: {finding.remedy}")
    click.echo(_summary(diagnosis))


def _print_table(diagnosis: Diagnosis) -> None:
    # Imported here, because scripts and --json need none of it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "probe", "observed", "wanted, and how to get it")
    styles = {"ok": "green", "missing": "bold red", "advice": "yellow"}
    for finding in diagnosis.findings:
        help_text = "" if finding.ok else f"{finding.wanted}\n{finding.remedy}"
        mark = Text(finding.mark, style=styles[finding.mark])
        table.add_row(mark, finding.name, Text(finding.observed), Text(help_text))
    console = Console()
    console.print(table)
    console.print(_summary(diagnosis))
