"""`drums serve`: the daemon."""

from __future__ import annotations

import logging
from pathlib import Path

import click
import trio

from drums.errors import ConfigError
from drums_core.config import load_config
from drums_core.daemon.serving import serve as serve_host
from drums_core.logs import configure_logging

PORT = 7070


def _listen(host: str | None, port: int | None, unix: Path | None) -> str | None:
    if unix is not None:
        if host is not None or port is not None:
            raise ConfigError("--unix excludes --host and --port", path="--unix")
        return f"unix:{unix.absolute()}"
    if host is None and port is None:
        return None
    host = host or "127.0.0.1"
    return f"[{host}]:{PORT if port is None else port}" if ":" in host else f"{host}:{PORT if port is None else port}"


@click.command()
@click.option("--host", help="Address to listen on; 127.0.0.1 otherwise.")
@click.option("--port", type=click.IntRange(0, 65535), help=f"TCP port; {PORT} otherwise, 0 for any free one.")
@click.option("--unix", type=click.Path(path_type=Path), help="Listen on a unix socket (mode 0600) instead.")
@click.option("--config", "config_file", type=click.Path(path_type=Path, exists=True), help="Configuration in TOML.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Where images, checkpoints and the journal are.")
@click.option("--osworld", type=click.Path(path_type=Path), help="The OSWorld checkout whose tasks are served.")
@click.option("--image", help="The image that desktops start from unless they say otherwise.")
@click.option("--max-slots", type=int, help="How many desktops may live at once.")
@click.option("--verbose", "-v", is_flag=True, help="Log every dropped connection as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with url and token_file once it is ready.")
def serve(
    host: str | None,
    port: int | None,
    unix: Path | None,
    config_file: Path | None,
    state_dir: Path | None,
    osworld: Path | None,
    image: str | None,
    max_slots: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Serve this machine's desktops over HTTP until SIGTERM or Ctrl-C.

    The token is in STATE_DIR/token, mode 0600; it is made at the first start. At the end every desktop is closed.

    \b
    sudo drums serve
    sudo drums serve --osworld /path/to/OSWorld --max-slots 8
    sudo drums serve --unix /run/drums.sock
    """
    configure_logging(logging.DEBUG if verbose else logging.INFO)
    config = load_config(
        config_file,
        listen=_listen(host, port, unix),
        state_dir=state_dir,
        osworld=osworld,
        image=image,
        max_slots=max_slots,
    )

    def ready(url: str) -> None:
        token_file = config.state_dir / "token"
        if as_json:
            import json

            click.echo(json.dumps({"url": url, "token_file": str(token_file)}))
        else:
            page = f"; watch the desktops at {url}/" if url.startswith("http") else ""
            click.echo(f"drums serves {url}, the token is in {token_file}{page}")

    async def run() -> None:
        await serve_host(config, on_ready=ready)

    trio.run(run)
