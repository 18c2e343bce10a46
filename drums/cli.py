"""The `drums` command: a group whose commands are found by entry point, so that the client stays a leaf.

A command of a package that is not installed (the host's commands without `drums[host]`) is listed with what to
install, and costs no start-up time.
"""

from __future__ import annotations

import signal
import sys
from importlib import metadata
from typing import Any

import click

import drums
from drums.errors import DrumsError

GROUP = "drums.commands"


class EntryPointGroup(click.Group):
    """A click group that loads a command only when it is called."""

    def _entries(self) -> dict[str, metadata.EntryPoint]:
        return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return sorted({*super().list_commands(ctx), *self._entries()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now.

        Raises:
            click.ClickException: its package, or something that this needs, is not installed.
        """
        command = super().get_command(ctx, cmd_name)
        entry = self._entries().get(cmd_name)
        if command is not None or entry is None:
            return command
        try:
            loaded = entry.load()
        except ImportError as e:
            raise click.ClickException(
                f"the command {cmd_name!r} needs more than the client: {e}\n(pip install 'drums[host,osworld]')"
            ) from e
        if not isinstance(loaded, click.Command):
            raise click.ClickException(f"the entry point {cmd_name!r} of {GROUP} is no click command")
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their first lines; one that cannot be loaded is listed as such."""
        rows = []
        for name in self.list_commands(ctx):
            try:
                command = self.get_command(ctx, name)
                text = command.get_short_help_str(80) if command else ""
            except click.ClickException:
                text = "(needs drums[host,osworld])"
            rows.append((name, text))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=EntryPointGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(drums.__version__, prog_name="drums")
def cli() -> None:
    """Linux desktops for computer-use agents, with a validity verdict on every score.

    \b
    On a worker host, as root:
      drums doctor              what this host can do, and what mends what it lacks
      drums image build minimal
      drums demo                the main job, end to end
      drums serve               the daemon

    \b
    Anywhere, with DRUMS_URL and DRUMS_TOKEN for a daemon on another machine:
      drums tasks --domain os
      slot=$(drums create e0df059f --ttl 600)
      drums step "$slot" "pyautogui.click(960, 540)"
      drums verify "$slot" --json
      drums slots close "$slot"
      drums stats --by label

    \b
    Completion of commands and options, for this shell (fish: ... fish_source drums | source):
      eval "$(_DRUMS_COMPLETE=bash_source drums)"
      eval "$(_DRUMS_COMPLETE=zsh_source drums)"
    """


def _end_on_signals() -> None:
    """Let the signals that end a session end a command as Ctrl-C does: with its clean-up.

    A shell without job control has what it starts in the background ignore SIGINT (POSIX, "Asynchronous Lists"). The
    others would be lost with it then, and nothing but SIGKILL would end the command.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))


def main(argv: list[str] | None = None, **extra: Any) -> None:
    """The entry point: errors of drums are told in words and end with exit code 1, without a traceback."""
    _end_on_signals()
    try:
        cli.main(args=argv, prog_name="drums", **extra)
    except DrumsError as e:
        click.echo(f"drums: {e.message}", err=True)
        if e.hint:
            click.echo(f"  ({e.hint})", err=True)
        sys.exit(1)
