"""`serve`: an open host behind HTTP until a signal or its caller ends it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import structlog
import trio

from drums_core.config import HostConfig
from drums_core.daemon.app import Daemon, make_app
from drums_core.daemon.metrics import Metrics
from drums_core.daemon.server import Server, close_socket, open_socket, url_of
from drums_core.daemon.token import ensure_token
from drums_core.opening import open_host
from drums_core.plugins import Plugins

_log = structlog.get_logger("drums.daemon")


async def serve(
    config: HostConfig,
    *,
    plugins: Plugins | None = None,
    on_ready: Callable[[str], None] = lambda _url: None,
    signals: bool = True,
) -> None:
    """Serve this machine's desktops until SIGTERM or SIGINT, or until cancelled.

    Args:
        on_ready: called with the URL once requests are answered.
        signals: whether to end at a signal; only the process's main thread can.

    At the end calls under way are cancelled, every desktop is closed and nothing is left.

    Raises:
        ConfigError, PrerequisiteError: as `open_host`; the address is not allowed, or somebody listens there.
    """
    sock = open_socket(config.listen, allow_remote=config.allow_remote)
    problem: Exception | None = None
    try:
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            if signals:
                await nursery.start(_watch_signals, stop)
            try:
                await _serve(config, plugins, sock, stop, on_ready)
            except Exception as e:  # noqa: BLE001 - raised below, outside of the nursery that would wrap it
                problem = e
            nursery.cancel_scope.cancel()
    finally:
        close_socket(sock, config.listen)
    if problem is not None:
        raise problem


async def _watch_signals(stop: trio.Event, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        task_status.started()
        async for number in received:
            _log.info("stopping", signal=signal.Signals(number).name)
            stop.set()


async def _serve(
    config: HostConfig,
    plugins: Plugins | None,
    sock: socket.socket,
    stop: trio.Event,
    on_ready: Callable[[str], None],
) -> None:
    url = url_of(sock)
    async with open_host(config, plugins=plugins) as host:
        token = await trio.to_thread.run_sync(ensure_token, config.state_dir)
        metrics = Metrics(host)
        async with trio.open_nursery() as background:
            background.start_soon(metrics.follow, host)
            stopping = trio.Event()
            server = Server(
                make_app(Daemon(host, background, metrics), token, stopping), [sock], config.max_connections
            )
            async with trio.open_nursery() as serving:
                await serving.start(server.run)
                _log.info("listening", url=url, state_dir=str(config.state_dir), slots=config.max_slots)
                on_ready(url)
                await stop.wait()
                stopping.set()
                server.stop.set()
            background.cancel_scope.cancel()
        _log.info("closing desktops", slots=len(host.slots))
    _log.info("stopped")
