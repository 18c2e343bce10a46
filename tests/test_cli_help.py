"""Every command of `drums`: its help has examples that it would take, and it prints JSON on request."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import attrs
import click
import pytest
from click.testing import CliRunner
from requires import requires

from drums.cli import cli
from drums_core.durable import write_json
from drums_core.image.store import RECORD, Image, inputs_digest

EXAMPLE = re.compile(r"^ +(?:sudo (?:\w+=\S+ )*|\w+=\$\()?(drums .*)$", re.M)
WITHOUT_JSON: dict[str, str] = {}
"""Commands without `--json`, each with the reason. None so far."""


def tree(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """A command and all below it, each with what a user types."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None, f"{path} {name}"
            yield from tree(below, f"{path} {name}")
    for entry in metadata.entry_points(group=path.replace("drums", "drums.commands", 1).replace(" ", ".")):
        if path != "drums":  # there, the group itself lists them
            yield from tree(entry.load(), f"{path} {entry.name}")


COMMANDS = dict(tree(cli, "drums"))


def faults(path: str, command: click.Command) -> list[str]:
    """What a command's help lacks, or says wrongly."""
    context = click.Context(command, info_name=path)
    options = {o for p in command.get_params(context) for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    own = [line for line in EXAMPLE.findall(command.get_help(context)) if f"{line} ".startswith(f"{path} ")]
    found = [] if own else [f"no example begins with {path!r}"]
    if not isinstance(command, click.Group):
        if "--json" not in options and path not in WITHOUT_JSON:
            found.append("no --json")
        words = " ".join(line.partition(" | ")[0] for line in own)
        found += [f"an example has {o}" for o in re.findall(r"(?<= )--[\w-]+", words) if o not in options]
    return found


def test_the_tree_is_whole() -> None:
    """Groups, what is below them, and what is found by entry point below a command."""
    assert {"drums image rm", "drums slots close", "drums verifier new", "drums tasks fetch", "drums serve"} <= set(
        COMMANDS
    )
    assert set(WITHOUT_JSON) <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS)
def test_help_has_examples_and_there_is_json(path: str) -> None:
    """Of its own, with options that it has."""
    assert faults(path, COMMANDS[path]) == []


def test_what_is_missing_is_seen() -> None:
    """A command without an example, with another's alone, with an option that it lacks, without --json."""

    def command(text: str, *, as_json: bool = True) -> click.Command:
        option = click.option("--json", "as_json", is_flag=True)
        made = click.command(help=text)(lambda as_json: None)
        return option(made) if as_json else made

    assert faults("drums x", command("Does it.\n\n\b\ndrums x --json")) == []
    assert faults("drums x", command("Does it, as drums x does.")) == ["no example begins with 'drums x'"]
    assert faults("drums x", command("Does it.\n\n\b\ndrums xy a")) == ["no example begins with 'drums x'"]
    assert faults("drums x", command("Does it.\n\n\b\nsudo A=b drums x --all")) == ["an example has --all"]
    assert faults("drums x", command("Does it.\n\n\b\ndrums x", as_json=False)) == ["no --json"]


@requires("root")
def test_images_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ensure` prints the image that is there, `ls` those that are built, `rm` what is gone."""
    monkeypatch.setenv("DRUMS_STATE_DIR", str(tmp_path))
    folder = tmp_path / "images/minimal"
    folder.mkdir(parents=True)
    image = Image("minimal", "d" * 64, time.time(), "0", 1, inputs_digest("minimal"), folder)
    write_json(folder / RECORD, attrs.asdict(image, filter=lambda a, _: a.name != "path"))
    image.set_golden("c-1")

    def document(*argv: str) -> dict[str, object]:
        done = CliRunner().invoke(cli, ["image", *argv, "--json"])
        assert done.exit_code == 0, (done.output, done.exception)
        found: dict[str, object] = json.loads(done.stdout)
        return found

    described = {**attrs.asdict(image), "path": str(folder), "golden": "c-1"}
    assert document("ensure", "minimal") == described
    assert document("ls")["images"] == [described]
    (folder / "golden.json").unlink()  # no host is opened for one that never booted
    assert document("rm", "minimal") == {"removed": "minimal", "golden": None}
    assert not folder.exists()
