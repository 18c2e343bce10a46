"""The routes: each takes a checked body, calls the host, and gives its answer as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import attrs
import structlog
import trio

import drums
from drums.errors import CheckpointNotFound, ConfigError, EpisodeNotFound, GuestError
from drums.reward import Verdict
from drums_core.checkpoint import Manifest
from drums_core.daemon import documents, requests
from drums_core.daemon.answers import Answer, EventFeed
from drums_core.daemon.metrics import MEDIA_TYPE as METRICS_TYPE
from drums_core.daemon.operations import Call, Operation
from drums_core.daemon.ports import pass_on, port_of
from drums_core.daemon.problems import of_file
from drums_core.image.software import Software, images_with
from drums_core.image.store import Image
from drums_core.journal import read_episode, read_episodes
from drums_core.model import Json, Task
from drums_core.slot import Slot
from drums_core.stats import read_stats

T = TypeVar("T")
LONGEST_WAIT_S = 600.0
_log = structlog.get_logger("drums.daemon")
_LOOK_S = 0.5


# --- documents


def slot_document(slot: Slot) -> dict[str, Json]:
    """A slot as JSON."""
    document = slot.describe()
    document["ttl"] = document.pop("ttl_s")
    document["expires_in"] = document.pop("expires_in_s")
    return document


def task_document(task: Task, software: Sequence[Software]) -> dict[str, Json]:
    """A task as JSON, with the images that suit it where this software is added to them."""
    document = attrs.asdict(task)
    document["config"] = [{"type": s.type, "parameters": dict(s.parameters)} for s in task.config]
    document["evaluator"] = dict(task.evaluator)
    document["applications"] = list(task.applications)
    document["remarks"] = list(task.remarks)
    document["images"] = [] if task.needs_web else images_with(task.applications, software)
    return document


def _checkpoint_document(manifest: Manifest) -> dict[str, Json]:
    task = manifest.task
    return {
        "id": manifest.id,
        "name": manifest.name,
        "kind": manifest.kind,
        "created_at": manifest.created_at,
        "size_bytes": sum(int(entry[0]) for entry in manifest.files.values()),
        "image": manifest.image,
        "image_digest": manifest.image_digest,
        "task": task["id"] if isinstance(task, dict) else None,
    }


# --- the host


async def _health(call: Call) -> dict[str, Json]:
    document: dict[str, Json] = {"status": "ok", "version": drums.__version__}
    if call.authorized:
        host = call.host
        document |= {
            "slots": len(host.slots),
            "max_slots": host.config.max_slots,
            "instance": host.services.instance,
        }
    return document


async def _tasks(call: Call) -> dict[str, Json]:
    def read() -> dict[str, Json]:
        tasks = [task_document(task, call.host.config.software) for task in call.host.tasks()]
        return {"tasks": tasks, "broken": call.host.broken_tasks()}

    return await trio.to_thread.run_sync(read)


async def _task(call: Call) -> dict[str, Json]:
    return task_document(call.host.task(call.parameters["task"]), call.host.config.software)


async def _plugins(call: Call) -> dict[str, Json]:
    return await _plugin_list(call, anew=False)


async def _reload_plugins(call: Call) -> dict[str, Json]:
    return await _plugin_list(call, anew=True)


async def _plugin_list(call: Call, *, anew: bool) -> dict[str, Json]:
    records = await trio.to_thread.run_sync(lambda: call.host.plugin_records(anew=anew))
    return {"plugins": [{**attrs.asdict(r), "ok": r.ok} for r in records]}


async def _images(call: Call) -> dict[str, Json]:
    def is_current(image: Image) -> bool:
        try:
            return call.host.images.is_current(image)
        except ConfigError as e:  # of what the setting `software` names; the others are told all the same
            _log.error("an image cannot be compared with its setting", image=image.name, error=str(e))
            return False

    def read() -> list[dict[str, Json]]:
        images = [call.host.images.load(name) for name in call.host.images.names()]
        return [
            {
                "name": image.name,
                "digest": image.digest,
                "built_at": image.built_at,
                "drums": image.drums,
                "size_bytes": image.size_bytes,
                "current": is_current(image),
                "golden": image.golden_id(),
            }
            for image in images
        ]

    return {"images": await trio.to_thread.run_sync(read)}


async def _checkpoints(call: Call) -> dict[str, Json]:
    manifests = await trio.to_thread.run_sync(call.host.checkpoints)
    return {"checkpoints": [_checkpoint_document(m) for m in manifests]}


async def _delete_checkpoint(call: Call) -> None:
    name = call.parameters["name"]
    manifests = await trio.to_thread.run_sync(call.host.checkpoints)
    if not any(name in (m.name, m.id) for m in manifests):
        raise CheckpointNotFound(f"no checkpoint {name!r}", checkpoint=name)
    await call.to_its_end(lambda: call.host.delete_checkpoint(name))


async def _episodes(call: Call) -> dict[str, Json]:
    await call.host.journal.flush()
    state, query = call.host.config.state_dir, call.query

    def read() -> list[dict[str, Json]]:
        return read_episodes(state, limit=query.limit, before=query.before)

    try:
        return {"episodes": await trio.to_thread.run_sync(read)}
    except LookupError as e:
        raise EpisodeNotFound(f"no episode {query.before!r}", episode=query.before) from e


async def _episode(call: Call) -> dict[str, Json]:
    await call.host.journal.flush()
    identity = call.parameters["episode"]
    try:
        return await trio.to_thread.run_sync(read_episode, call.host.config.state_dir, identity)
    except LookupError as e:
        raise EpisodeNotFound(f"no episode {identity!r}", episode=identity) from e


async def _reverify(call: Call) -> dict[str, Json]:
    body: requests.ReverifyEpisode = call.body
    return (await call.host.reverify(call.parameters["episode"], anyway=body.anyway)).to_dict()


async def _stats(call: Call) -> dict[str, Json]:
    await call.host.journal.flush()
    state, query = call.host.config.state_dir, call.query
    return {
        "rows": await trio.to_thread.run_sync(
            lambda: read_stats(state, by=query.by, label=query.label, since=query.since, all=query.all)
        )
    }


async def _events(call: Call) -> EventFeed:
    return EventFeed(call.host, None)


async def _metrics(call: Call) -> Answer:
    return Answer(200, call.metrics.text(), METRICS_TYPE)


# --- slots


async def _create(call: Call) -> Answer:
    body: requests.CreateSlot = call.body
    slot = await call.host.create(
        body.task,
        image=body.image,
        checkpoint=body.checkpoint,
        ttl_s=body.ttl,
        labels=body.labels,
        on_slot=lambda slot: call.following.slots.add(slot.id),
    )

    async def undo() -> None:
        await slot.close(reason="its creator left before it was told")

    return Answer(201, slot_document(slot), headers={"Location": f"/v1/slots/{slot.id}"}, undo=undo)


async def _slots(call: Call) -> dict[str, Json]:
    slots = [slot_document(slot) for slot in call.host.slots.values()]
    await call.host.journal.flush()  # a verdict that is answered is on disk
    return {"slots": slots}


async def _slot(call: Call) -> dict[str, Json]:
    document = slot_document(call.slot())
    await call.host.journal.flush()
    return document


async def _close(call: Call) -> None:
    await call.to_its_end(call.slot().close)


async def _reset(call: Call) -> dict[str, Json]:
    slot = call.slot()
    await slot.reset()
    return slot_document(slot)


async def _fork(call: Call) -> Answer:
    body: requests.ForkSlot = call.body
    children = await call.slot().fork(body.n)

    async def undo() -> None:
        for child in children:
            await child.close(reason="its creator left before it was told")

    return Answer(200, {"slots": [slot_document(child) for child in children]}, undo=undo)


async def _save(call: Call) -> dict[str, Json]:
    body: requests.SaveSlot = call.body
    checkpoint = await call.slot().save(body.name)
    return {"checkpoint": _checkpoint_document(checkpoint.manifest)}


async def _step(call: Call) -> dict[str, Json]:
    body: requests.StepSlot = call.body
    found = await call.slot().step(body.action)
    code = found.get("returncode")
    return {
        "status": str(found.get("status", "")),
        "output": str(found.get("output", "")),
        "error": str(found.get("error", "")),
        "returncode": code if isinstance(code, int) else -1,
    }


async def _execute(call: Call) -> dict[str, Json]:
    body: requests.ExecuteInSlot = call.body
    slot = call.slot()
    try:
        result = await slot.execute(body.command, shell=body.shell, timeout_s=body.timeout)
    except GuestError as e:
        if e.facts.get("guest_status") == 400:
            raise ConfigError(f"the desktop refuses the command: {e.message}", path="$.command") from e
        raise
    return {"returncode": result.returncode, "output": result.output, "error": result.error}


async def _verify(call: Call) -> dict[str, Json]:
    body: requests.VerifySlot = call.body
    reward = await call.slot().verify(strict=False, in_place=body.in_place, keep=body.keep)
    return reward.to_dict()


async def _wait(call: Call) -> dict[str, Json]:
    body: requests.WaitForVerdict = call.body
    slot = call.slot()
    episode = slot.episode
    limit = LONGEST_WAIT_S if body.timeout is None else min(body.timeout, LONGEST_WAIT_S)
    with trio.move_on_after(limit):
        # One that ends before it is judged has no verdict to wait for.
        while episode.validity.verdict is Verdict.PENDING and not episode.closed:
            with trio.move_on_after(_LOOK_S):
                await episode.wait_judged()
    return await _report(call, slot)


async def _report(call: Call, slot: Slot) -> dict[str, Json]:
    report = slot.gates()
    await call.host.journal.flush()
    return report


async def _gates(call: Call) -> dict[str, Json]:
    return await _report(call, call.slot())


async def _quarantine(call: Call) -> dict[str, Json]:
    body: requests.QuarantineSlot = call.body
    slot = call.slot()
    slot.quarantine(body.reason)
    await call.host.journal.flush()
    return slot_document(slot)


async def _release(call: Call) -> dict[str, Json]:
    slot = call.slot()
    await call.to_its_end(slot.release)
    return slot_document(slot)


async def _extend(call: Call) -> dict[str, Json]:
    body: requests.ExtendSlot = call.body
    slot = call.slot()
    slot.extend(body.ttl)
    return slot_document(slot)


async def _screenshot(call: Call) -> Answer:
    return Answer(200, await call.slot().screenshot(), "image/png")


async def _accessibility(call: Call) -> Json:
    return await call.slot().accessibility()


async def _slot_events(call: Call) -> EventFeed:
    return EventFeed(call.host, call.slot().id)


async def _read_file(call: Call) -> Answer:
    query: requests.FileQuery = call.query
    try:
        return Answer(200, await call.slot().read_file(query.path), "application/octet-stream")
    except GuestError as e:
        raise of_file(e, query.path) from e


async def _write_file(call: Call) -> None:
    query: requests.FileQuery = call.query
    try:
        await call.slot().write_file(query.path, call.body)
    except GuestError as e:
        raise of_file(e, query.path) from e


async def _port(call: Call) -> Answer:
    port = port_of(call.parameters["port"])
    content = call.body if isinstance(call.body, bytes) else b""
    return await pass_on(call.slot(), port, call.request, call.request.method, content)


@attrs.frozen
class AccessibilityTree:
    """The accessibility tree as XML, and the programs whose part of it is not whole: they did not answer in time."""

    AT: str
    unanswered: list[str] = attrs.field(factory=list)


def _slot_call(name: str, summary: str, handler: Any, answer: Any, body: type, **more: Any) -> Operation:
    return Operation(
        f"{name}_slot", "POST", f"/v1/slots/{{slot}}/{name}", summary, handler, answer, body=body, mutating=True, **more
    )


def _port_call(method: str) -> Operation:
    path = "/v1/slots/{slot}/ports/{port}/{path}"
    summary = "What listens on a port of the desktop"
    has_body = method in ("PUT", "POST")
    return Operation(f"{method.lower()}_port", method, path, summary, _port, "*/*", raw_body=has_body, of_port=True)


EVENTS = "text/event-stream"
OPERATIONS = (
    Operation("health", "GET", "/v1/health", "Whether it answers", _health, documents.Health, needs_token=False),
    Operation("tasks", "GET", "/v1/tasks", "All tasks", _tasks, documents.TaskList),
    Operation("task", "GET", "/v1/tasks/{task}", "A task, by id or unique prefix", _task, documents.TaskDocument),
    Operation(
        "create_slot",
        "POST",
        "/v1/slots",
        "A new desktop",
        _create,
        documents.SlotDocument,
        status=201,
        body=requests.CreateSlot,
        mutating=True,
        long=True,
    ),
    Operation("slots", "GET", "/v1/slots", "All slots", _slots, documents.SlotList),
    Operation("slot", "GET", "/v1/slots/{slot}", "A slot", _slot, documents.SlotDocument),
    Operation("close_slot", "DELETE", "/v1/slots/{slot}", "End a desktop", _close, None, status=204, mutating=True),
    _slot_call(
        "reset", "Back to where it was created from", _reset, documents.SlotDocument, requests.Nothing, long=True
    ),
    _slot_call("fork", "Children from where it is", _fork, documents.SlotList, requests.ForkSlot, long=True),
    _slot_call("save", "Keep its state under a name", _save, documents.SavedCheckpoint, requests.SaveSlot, long=True),
    _slot_call("step", "One action of the agent", _step, documents.StepResult, requests.StepSlot, acts=True),
    _slot_call(
        "execute", "A command as the user", _execute, documents.ExecuteResult, requests.ExecuteInSlot, acts=True
    ),
    _slot_call("verify", "Score it", _verify, documents.RewardDocument, requests.VerifySlot, long=True),
    _slot_call("quarantine", "Mark it as broken", _quarantine, documents.SlotDocument, requests.QuarantineSlot),
    _slot_call("release", "End a quarantined desktop", _release, documents.SlotDocument, requests.Nothing),
    _slot_call("extend", "Let it live longer", _extend, documents.SlotDocument, requests.ExtendSlot),
    Operation(
        "wait_slot",
        "POST",
        "/v1/slots/{slot}/wait",
        "Wait for the verdict",
        _wait,
        documents.GateReport,
        body=requests.WaitForVerdict,
    ),
    Operation("gates", "GET", "/v1/slots/{slot}/gates", "The gate report", _gates, documents.GateReport),
    Operation("screenshot", "GET", "/v1/slots/{slot}/screenshot", "The screen", _screenshot, "image/png"),
    Operation(
        "accessibility",
        "GET",
        "/v1/slots/{slot}/accessibility",
        "The accessibility tree",
        _accessibility,
        AccessibilityTree,
    ),
    Operation("slot_events", "GET", "/v1/slots/{slot}/events", "Its events from now on", _slot_events, EVENTS),
    Operation("events", "GET", "/v1/events", "All events from now on", _events, EVENTS),
    Operation(
        "read_file",
        "GET",
        "/v1/slots/{slot}/files",
        "A file's content",
        _read_file,
        "application/octet-stream",
        query=requests.FileQuery,
    ),
    Operation(
        "write_file",
        "PUT",
        "/v1/slots/{slot}/files",
        "Write a file",
        _write_file,
        None,
        status=204,
        query=requests.FileQuery,
        raw_body=True,
        mutating=True,
        acts=True,
    ),
    *map(_port_call, ("GET", "PUT", "POST", "DELETE")),
    Operation("checkpoints", "GET", "/v1/checkpoints", "Kept checkpoints", _checkpoints, documents.CheckpointList),
    Operation(
        "delete_checkpoint",
        "DELETE",
        "/v1/checkpoints/{name}",
        "Remove a checkpoint",
        _delete_checkpoint,
        None,
        status=204,
        mutating=True,
    ),
    Operation(
        "episodes", "GET", "/v1/episodes", "Episodes", _episodes, documents.EpisodeList, query=requests.EpisodesQuery
    ),
    Operation("episode", "GET", "/v1/episodes/{episode}", "An episode", _episode, documents.EpisodeDocument),
    Operation(
        "reverify_episode",
        "POST",
        "/v1/episodes/{episode}/reverify",
        "Grade its end state again",
        _reverify,
        documents.Reverification,
        body=requests.ReverifyEpisode,
        mutating=True,
        long=True,
    ),
    Operation("stats", "GET", "/v1/stats", "How episodes came out", _stats, documents.Stats, query=requests.StatsQuery),
    Operation("plugins", "GET", "/v1/plugins", "What is installed", _plugins, documents.PluginList),
    Operation(
        "reload_plugins",
        "POST",
        "/v1/plugins/reload",
        "Find verifiers anew",
        _reload_plugins,
        documents.PluginList,
        body=requests.Nothing,
        mutating=True,
    ),
    Operation("images", "GET", "/v1/images", "What desktops start from", _images, documents.ImageList),
    Operation("metrics", "GET", "/metrics", "For Prometheus", _metrics, "text/plain"),
)
