"""`drums verifier`: making and trying verifier packages."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def verifier() -> None:
    """Make and try verifiers of your own.

    \b
    drums verifier new demo
    drums verifier test demo
    """


@verifier.command()
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), metavar="FOLDER", help="Folder to make; ./NAME otherwise.")
@click.option("--json", "as_json", is_flag=True, help="Print the folder and its files as JSON.")
def new(name: str, into: Path | None, as_json: bool) -> None:
    """Make a package for the verifier NAME, with recorded end states and a test.

    \b
    drums verifier new demo
    drums verifier new demo --into ~/checks/demo
    """
    from drums_core.commands.output import print_json
    from drums_verifiers.scaffold import create_package

    target = into or Path(name)
    made = create_package(name, target)
    if as_json:
        print_json({"folder": str(target), "files": [str(path) for path in made]})
        return
    for path in made:
        click.echo(str(path))
    click.echo(f"try it: drums verifier test {target}", err=True)


@verifier.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--live", is_flag=True, help="Also on real desktops of this machine; needs root.")
@click.option("--json", "as_json", is_flag=True, help="Print the rules as JSON.")
def test(path: Path, live: bool, as_json: bool) -> None:
    """Try the package in PATH on its recorded end states; without a host, and without root.

    Each function needs four cases: the solution, the untouched start, a plausible wrong answer, a damaged state. Exit
    code 1 when a rule is broken.

    \b
    drums verifier test demo
    sudo drums verifier test demo --live
    """
    import attrs

    from drums_core.commands.output import print_json
    from drums_verifiers.package_trial import open_package, try_package

    package = open_package(path)
    checks = try_package(package)
    if live:
        from drums_verifiers.live_trial import try_live

        checks += try_live(package)
    failed = [check for check in checks if not check.ok]
    if as_json:
        print_json({"checks": [{**attrs.asdict(c), "ok": c.ok} for c in checks]})
    else:
        for check in checks:
            click.echo(f"ok      {check.rule}" if check.ok else f"BROKEN  {check.rule}: {check.fault}")
        click.echo(f"{len(checks)} rules, {len(failed)} broken", err=True)
    if failed:
        raise SystemExit(1)
