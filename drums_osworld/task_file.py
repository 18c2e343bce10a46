"""Reading an OSWorld task's JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs
from cattrs import transform_error

from drums.errors import ConfigError
from drums_core.model import SetupStep, Task
from drums_osworld.applications import needed_applications
from drums_osworld.live_web import needs_web
from drums_osworld.steps.parameters import describe
from drums_osworld.support import unsupported_reason


@attrs.frozen
class _Document:
    """The fields that drums reads; a task file has more. OSWorld's have no `needs_web`; an operator's own may."""

    id: str
    instruction: str
    evaluator: dict[str, Any]
    config: list[SetupStep] = attrs.field(factory=list)
    needs_web: bool | None = None


def _text(value: object, _: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, found {value!r:.60}")
    return value


def _switch(value: object, _: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, found {value!r:.60}")
    return value


def _mapping(value: object, _: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {value!r:.60}")
    return value


def _step(value: object, _: object) -> SetupStep:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ValueError(f"expected a step with a type, found {value!r:.60}")
    return SetupStep(value["type"], _mapping(value.get("parameters", {}), None))


def _steps(value: object, _: object) -> list[SetupStep]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of steps, found {value!r:.60}")
    return [_step(x, None) for x in value]


_converter = cattrs.Converter()
_converter.register_structure_hook(str, _text)
_converter.register_structure_hook_func(lambda kind: kind == bool | None, _switch)
_converter.register_structure_hook_func(lambda kind: kind == dict[str, Any], _mapping)
_converter.register_structure_hook_func(lambda kind: kind == list[SetupStep], _steps)


def structure_steps(value: object, where: str) -> list[SetupStep]:
    """A list of steps; raises `ConfigError` naming `where`."""
    try:
        return _steps(value, None)
    except ValueError as e:
        raise ConfigError(f"{where}: {e}", path=where) from e


def _instruction_text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key, "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _related(document: Mapping[str, Any]) -> list[Any]:
    value = document.get("related_apps")
    return value if isinstance(value, list) else []


def _remarks(document: Mapping[str, Any]) -> tuple[str, ...]:
    """What of a task's file has no effect here."""
    return ("`proxy: true` is not applied: desktops have no network",) if document.get("proxy") is True else ()


def read_task(path: Path, *, domain: str, expected_id: str) -> Task:
    """The task in a file.

    Raises:
        ConfigError: it cannot be read or is no task; `.path` names the file, `.faults` each place in it.
    """
    try:
        data = path.read_bytes()
        document = json.loads(data)
    except (OSError, ValueError) as e:
        raise ConfigError(f"task file {str(path)!r} cannot be read: {e}", path=str(path), faults=[str(e)]) from e
    try:
        if not isinstance(document, dict):
            raise ValueError("expected an object @ $")
        parsed = _converter.structure(document, _Document)
        if parsed.id != expected_id:
            raise ValueError(f"id is {parsed.id!r}, the list says {expected_id!r} @ $.id")
        if "func" not in parsed.evaluator:
            raise ValueError("required field missing @ $.evaluator.func")
    except (cattrs.BaseValidationError, ValueError) as e:
        faults = (
            transform_error(e, format_exception=describe) if isinstance(e, cattrs.BaseValidationError) else [str(e)]
        )
        raise ConfigError(
            f"task file {str(path)!r} is wrong: {'; '.join(faults)}", path=str(path), faults=faults
        ) from e
    reason = unsupported_reason(parsed.evaluator)
    web = parsed.needs_web
    if web is None:
        web = needs_web(parsed.id, parsed.instruction, parsed.config, parsed.evaluator)
    return Task(
        id=parsed.id,
        instruction=parsed.instruction,
        config=tuple(parsed.config),
        evaluator=parsed.evaluator,
        domain=domain,
        sha256=hashlib.sha256(data).hexdigest(),
        supported=not reason,
        unsupported_reason=reason,
        source=_instruction_text(document, "source"),
        applications=needed_applications(parsed.config, parsed.evaluator, _related(document)),
        needs_web=web,
        remarks=_remarks(document),
    )
