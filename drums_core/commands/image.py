"""`drums image`: build, list and remove images."""

from __future__ import annotations

import os
import time
from pathlib import Path

import attrs
import click
import trio

from drums.errors import ImageNotFound, PrerequisiteError
from drums_core.commands.output import print_json, print_table, progress_bar
from drums_core.config import HostConfig, load_config
from drums_core.image.recipe import known_recipes
from drums_core.image.store import Image, ImageStore
from drums_core.logs import configure_logging
from drums_core.opening import open_host

_config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, exists=True),
    help="Configuration in TOML, where drums serve has one of its own.",
)


def _store(config: HostConfig | None = None) -> ImageStore:
    config = config or load_config()
    return ImageStore(config.state_dir / "images", config.software)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise PrerequisiteError(f"images need root, this is uid {os.geteuid()}", hint="run it with sudo")


async def _make_golden(name: str, config: HostConfig) -> str:
    async with open_host(config) as host:
        return (await host.golden(name)).id


def _describe(image: Image) -> dict[str, object]:
    document = attrs.asdict(image)
    return {**document, "path": str(image.path), "golden": image.golden_id()}


@click.group()
def image() -> None:
    """Build, list and remove the images that desktops start from.

    \b
    sudo drums image build minimal
    sudo drums image ls --json
    """


def _build(name: str, mirror: str | None, config: HostConfig) -> None:
    with progress_bar(f"image {name}") as progress:
        _store(config).build(name, mirror=mirror, progress=progress)


@image.command()
@click.argument("name")
@click.option("--mirror", help="Debian mirror to install from; the host's own otherwise.")
@_config_option
@click.option("--json", "as_json", is_flag=True, help="Print the image as JSON.")
def build(name: str, mirror: str | None, config_file: Path | None, as_json: bool) -> None:
    """Build the image NAME, boot it once, and dump its golden checkpoint.

    Replaces an older build of the same name. An interrupted build leaves nothing. What the setting `software` adds
    to the image (packages of another apt source, such as VS Code: docs/install.md) is fetched first.

    \b
    sudo drums image build osworld
    sudo drums image build minimal --mirror http://mirror.example/debian --json
    """
    _require_root()
    configure_logging()
    began = time.monotonic()
    config = load_config(config_file)
    _build(name, mirror, config)
    click.echo("booting it and dumping its golden checkpoint", err=True)
    trio.run(_make_golden, name, config)
    built = _store(config).load(name)
    if as_json:
        print_json(_describe(built))
    else:
        click.echo(f"image {name} {built.digest[:12]} built in {time.monotonic() - began:.0f} s")


@image.command()
@click.argument("name")
@click.option("--mirror", help="Debian mirror to install from; the host's own otherwise.")
@_config_option
@click.option("--json", "as_json", is_flag=True, help="Print the image as JSON.")
def ensure(name: str, mirror: str | None, config_file: Path | None, as_json: bool) -> None:
    """Build the image NAME and make its golden checkpoint, unless they are there and current.

    \b
    sudo drums image ensure minimal
    sudo drums image ensure osworld --json
    """
    _require_root()
    configure_logging()
    config = load_config(config_file)
    store = _store(config)
    try:
        there = store.is_current(store.load(name))
    except ImageNotFound:
        there = False
    if not there:
        _build(name, mirror, config)
    if store.load(name).golden_id() is None:
        click.echo("booting the image and dumping its golden checkpoint", err=True)
        trio.run(_make_golden, name, config)
    if as_json:
        print_json(_describe(store.load(name)))


@image.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print the images as JSON.")
def list_images(as_json: bool) -> None:
    """List the images that are built, and the recipes that are known.

    \b
    sudo drums image ls
    sudo drums image ls --json
    """
    _require_root()
    store = _store()
    built = [store.load(name) for name in store.names()]
    if as_json:
        print_json({"images": [_describe(i) for i in built], "recipes": list(known_recipes())})
        return
    rows = [
        [i.name, i.digest[:12], f"{i.size_bytes / 1e6:.0f} MB", time.strftime("%F %T", time.localtime(i.built_at))]
        for i in built
    ]
    print_table("images", ["name", "digest", "size", "built"], rows)
    missing = sorted(set(known_recipes()) - {i.name for i in built})
    if missing:
        click.echo(f"not built: {', '.join(missing)}", err=True)


@image.command("rm")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print what was removed as JSON.")
def remove(name: str, as_json: bool) -> None:
    """Remove the image NAME and its golden checkpoint; refused while desktops use it.

    \b
    sudo drums image rm osworld
    """
    _require_root()
    store = _store()
    golden = store.load(name).golden_id()
    store.remove(name)
    if golden is not None:
        trio.run(_discard_golden, golden)
    if as_json:
        print_json({"removed": name, "golden": golden})
    else:
        click.echo(f"removed image {name}")


async def _discard_golden(identity: str) -> None:
    async with open_host() as host:
        await host.discard_unused(identity)
