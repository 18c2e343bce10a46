"""The asynchronous client, for trio and asyncio: `drums.connect_async()`, `AsyncClient` and `AsyncEnv`.

The names and what they do are those of `drums._client`, each to be awaited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from drums import _calls
from drums._calls import Default, Document, SlotView, note_failed_close
from drums._endpoint import Endpoint, find_endpoint
from drums._eventloop import finish
from drums._spawn import SpawnedDaemon, is_wanted
from drums._transport import AsyncTransport
from drums.errors import DrumsError

if TYPE_CHECKING:
    from drums.reward import Reward

CLOSE_S = 90.0  # how long a cancelled caller is held up by a daemon that does not answer


def connect_async(url: str | None = None, token: str | None = None, allow_insecure_http: bool = False) -> AsyncClient:
    """`drums.connect` for trio and asyncio: `async with drums.connect_async() as client`.

    Not to be awaited; where a daemon has to be started, that happens as the `async with` is entered.
    """
    client = AsyncClient(find_endpoint(url, token, allow_insecure_http=allow_insecure_http))
    client._starts_daemon = is_wanted(url)
    return client


class AsyncClient:
    """One daemon. Made by `connect_async`; several tasks may use one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._transport = AsyncTransport(endpoint)
        self._run = self._transport.run
        self._daemon: SpawnedDaemon | None = None
        self._starts_daemon = False

    def __repr__(self) -> str:
        return f"<drums.AsyncClient of {self.url!r}>"

    async def __aenter__(self) -> AsyncClient:
        if self._starts_daemon and self._daemon is None:
            self._daemon = SpawnedDaemon()
            try:
                self._transport.endpoint = await self._run(self._daemon.ready())
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """The daemon's address."""
        return self._transport.endpoint.url

    async def close(self) -> None:
        """See `drums.Client.close`."""
        await finish(self._close, CLOSE_S)

    async def _close(self) -> None:
        await self._transport.close()
        if self._daemon is not None:
            await self._run(self._daemon.stopped())

    async def health(self) -> Document:
        """See `drums.Client.health`."""
        return await self._run(_calls.get("/v1/health"))

    async def tasks(self) -> list[Document]:
        """See `drums.Client.tasks`."""
        return await self._run(_calls.listing("/v1/tasks", "tasks"))

    async def broken_tasks(self) -> dict[str, str]:
        """See `drums.Client.broken_tasks`."""
        return await self._run(_calls.broken_tasks())

    async def task(self, prefix: str) -> Document:
        """See `drums.Client.task`."""
        return await self._run(_calls.task(prefix))

    async def create(
        self,
        task: str | None = None,
        image: str | None = None,
        checkpoint: str | None = None,
        ttl: float | Default | None = Default.TTL,
        network: str = "none",
        labels: Mapping[str, str] | None = None,
    ) -> AsyncEnv:
        """See `drums.Client.create`: `async with await client.create(…) as env`."""
        return self._env(await self._run(_calls.create(task, image, checkpoint, ttl, network, labels)))

    async def slots(self) -> list[Document]:
        """See `drums.Client.slots`."""
        return await self._run(_calls.listing("/v1/slots", "slots"))

    async def slot(self, id: str) -> AsyncEnv:
        """See `drums.Client.slot`."""
        return self._env(await self._run(_calls.describe(id)))

    async def checkpoints(self) -> list[Document]:
        """See `drums.Client.checkpoints`."""
        return await self._run(_calls.listing("/v1/checkpoints", "checkpoints"))

    async def episodes(self, limit: int | None = None, before: str | None = None) -> list[Document]:
        """See `drums.Client.episodes`."""
        return await self._run(_calls.episodes(limit, before))

    async def episode(self, id: str) -> Document:
        """See `drums.Client.episode`."""
        return await self._run(_calls.episode(id))

    async def reverify(self, id: str, *, anyway: bool = False) -> Document:
        """See `drums.Client.reverify`."""
        return await self._run(_calls.reverify(id, anyway))

    async def stats(
        self, by: str = "both", label: str = "policy", since: float | None = None, *, all: bool = False
    ) -> list[Document]:
        """See `drums.Client.stats`."""
        return await self._run(_calls.stats(by, label, since, all))

    async def plugins(self) -> list[Document]:
        """See `drums.Client.plugins`."""
        return await self._run(_calls.listing("/v1/plugins", "plugins"))

    async def reload_plugins(self) -> list[Document]:
        """See `drums.Client.reload_plugins`."""
        return await self._run(_calls.reload_plugins())

    async def images(self) -> list[Document]:
        """See `drums.Client.images`."""
        return await self._run(_calls.listing("/v1/images", "images"))

    def _env(self, slot: Document) -> AsyncEnv:
        return AsyncEnv(self._transport, slot)


class AsyncEnv(SlotView):
    """One desktop. Made by `AsyncClient.create` and the like; use it as an async context manager, which closes it."""

    def __init__(self, transport: AsyncTransport, slot: Document) -> None:
        super().__init__(slot)
        self._transport = transport
        self._run = transport.run

    async def __aenter__(self) -> AsyncEnv:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except (DrumsError, TimeoutError) as e:
            note_failed_close(error, f"desktop {self.id}", e)

    async def refresh(self) -> Document:
        """See `drums.Env.refresh`."""
        self._learn(await self._run(_calls.describe(self.id)))
        return dict(self._slot)

    async def wait_valid(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the daemon waits
        """See `drums.Env.wait_valid`."""
        await self._run(_calls.wait_valid(self.id, timeout))

    async def gates(self) -> Document:
        """See `drums.Env.gates`."""
        return await self._run(_calls.gates(self.id))

    async def screenshot(self) -> bytes:
        """See `drums.Env.screenshot`."""
        return await self._run(_calls.screenshot(self.id))

    async def accessibility(self) -> str:
        """See `drums.Env.accessibility`."""
        return await self._run(_calls.accessibility(self.id))

    async def step(self, action: str) -> Document:
        """See `drums.Env.step`."""
        return await self._run(_calls.step(self.id, action))

    async def execute(
        self,
        command: str | Sequence[str],
        shell: bool = False,
        timeout: float = 120,  # noqa: ASYNC109 - the command's, which the desktop holds
    ) -> Document:
        """See `drums.Env.execute`."""
        return await self._run(_calls.execute(self.id, command, shell, timeout))

    async def read_file(self, path: str) -> bytes:
        """See `drums.Env.read_file`."""
        return await self._run(_calls.read_file(self.id, path))

    async def write_file(self, path: str, data: bytes) -> None:
        """See `drums.Env.write_file`."""
        await self._run(_calls.write_file(self.id, path, data))

    async def reset(self) -> None:
        """See `drums.Env.reset`."""
        self._learn(await self._run(_calls.operate(self.id, "reset", is_long=True)))

    async def fork(self, n: int = 1) -> list[AsyncEnv]:
        """See `drums.Env.fork`."""
        return [AsyncEnv(self._transport, slot) for slot in await self._run(_calls.fork(self.id, n))]

    async def save(self, name: str) -> Document:
        """See `drums.Env.save`."""
        return await self._run(_calls.save(self.id, name))

    async def quarantine(self, reason: str) -> None:
        """See `drums.Env.quarantine`."""
        self._learn(await self._run(_calls.operate(self.id, "quarantine", {"reason": reason})))

    async def release(self) -> None:
        """See `drums.Env.release`."""
        self._learn(await self._run(_calls.operate(self.id, "release")))

    async def extend(self, ttl: float | None) -> None:
        """See `drums.Env.extend`."""
        self._learn(await self._run(_calls.operate(self.id, "extend", {"ttl": ttl})))

    async def verify(self, strict: bool = True, *, in_place: bool | None = None, keep: bool | None = None) -> Reward:
        """See `drums.Env.verify`."""
        return await self._run(_calls.verify(self.id, strict, in_place, keep))

    async def close(self) -> None:
        """See `drums.Env.close`. Done to its end although the caller is cancelled."""
        if not self._closed:
            await finish(self._close, CLOSE_S)

    async def _close(self) -> None:
        await self._run(_calls.close(self.id))
        self._end()
