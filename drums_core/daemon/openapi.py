"""The OpenAPI 3.1 document, made of the routes' table and of the classes in `requests` and `documents`."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import attrs

import drums
from drums_core.daemon.documents import Problem
from drums_core.daemon.problems import MEDIA_TYPE
from drums_core.daemon.requests import Bound
from drums_core.host import UNSET

if TYPE_CHECKING:
    from drums_core.daemon.operations import Operation

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_KEYWORDS = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "le": "maximum",
    "min_length": "minLength",
    "max_length": "maxLength",
    "pattern": "pattern",
}


def schema_of(kind: Any, components: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a type; classes go into `components`, once each.

    Raises:
        TypeError: a type that JSON does not have.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if kind is type(None):
        return {"type": "null"}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if origin is Annotated:
        bounds = [x for x in arguments[1:] if isinstance(x, Bound)]
        limits = {_KEYWORDS[k]: v for b in bounds for k, v in attrs.asdict(b).items() if v is not None}
        return {**schema_of(arguments[0], components), **limits}
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(x, components) for x in arguments]}
    if origin is list:
        return {"type": "array", "items": schema_of(arguments[0], components)}
    if origin is dict:
        values = {"type": "object", "additionalProperties": schema_of(arguments[1], components) or True}
        names = schema_of(arguments[0], components)
        return values if names == {"type": "string"} else {**values, "propertyNames": names}
    if attrs.has(kind):
        if kind.__name__ not in components:
            components[kind.__name__] = {}  # a class may contain itself
            components[kind.__name__] = _class_schema(kind, components)
        return {"$ref": f"#/components/schemas/{kind.__name__}"}
    raise TypeError(f"{kind!r} has no JSON Schema")


def _class_schema(kind: type, components: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for field in attrs.fields(kind):
        schema = schema_of(hints[field.name], components)
        if field.default is attrs.NOTHING:
            required.append(field.name)
        elif field.default is not UNSET and field.default is not None:
            default = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
            schema = {**schema, "default": default}
        properties[field.name] = schema
    document: dict[str, Any] = {
        "type": "object",
        "description": inspect.cleandoc(kind.__doc__ or ""),
        "properties": properties,
        "additionalProperties": False,
    }
    return {**document, "required": required} if required else document


def _content(schema: Mapping[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": schema}}


def _parameters(operation: Operation, components: dict[str, Any]) -> list[dict[str, Any]]:
    found = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1, "maxLength": 200}}
        for name in operation.path_parameters
    ]
    if operation.query is not None:
        schema = _class_schema(operation.query, components)
        for name, field in schema["properties"].items():
            # A parameter is there or not; none can be null.
            kinds = [x for x in field.get("anyOf", [field]) if x != {"type": "null"}]
            required = name in schema.get("required", ())
            found.append({"name": name, "in": "query", "required": required, "schema": kinds[0]})
    if operation.mutating:
        found.append({"$ref": "#/components/parameters/IdempotencyKey"})
    return found


def _body(operation: Operation, components: dict[str, Any]) -> dict[str, Any] | None:
    if operation.raw_body:
        return {
            "required": True,
            "content": _content({"type": "string", "format": "binary"}, "application/octet-stream"),
        }
    if operation.body is None:
        return None
    required = any(f.default is attrs.NOTHING for f in attrs.fields(operation.body))
    return {"required": required, "content": _content(schema_of(operation.body, components))}


def _success(operation: Operation, components: dict[str, Any]) -> dict[str, Any]:
    if operation.answer is None:
        return {"description": "Done"}
    if isinstance(operation.answer, str):
        binary = {"type": "string"} if operation.answer.startswith("text/") else {"type": "string", "format": "binary"}
        return {"description": "The content", "content": _content(binary, operation.answer)}
    content = _content(schema_of(operation.answer, components))
    if operation.long:
        content |= _content({"type": "string"}, "text/event-stream")
    answer = {"description": inspect.cleandoc(operation.answer.__doc__ or ""), "content": content}
    return answer


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """The whole document."""
    components: dict[str, Any] = {}
    problem = schema_of(Problem, components)
    paths: dict[str, Any] = {}
    for operation in operations:
        # Streams answer 200 whatever comes of the operation, which their last event says.
        statuses = {str(operation.status): _success(operation, components)}
        if operation.long and operation.status != 200:
            statuses["200"] = {"description": "Progress", "content": _content({"type": "string"}, "text/event-stream")}
        entry: dict[str, Any] = {
            "operationId": operation.name,
            "summary": operation.summary,
            "responses": {
                **statuses,
                "default": {"description": "A problem", "content": _content(problem, MEDIA_TYPE)},
            },
        }
        if parameters := _parameters(operation, components):
            entry["parameters"] = parameters
        if (body := _body(operation, components)) is not None:
            entry["requestBody"] = body
        if not operation.needs_token:
            entry["security"] = [{}, {"token": []}]
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    key = {
        "name": "Idempotency-Key",
        "in": "header",
        "required": False,
        "description": "The same key with the same request gets the same answer, for 24 hours.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "drums",
            "version": drums.__version__,
            "description": "Linux desktops for computer-use agents, with a validity verdict on every score.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:7070"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "parameters": {"IdempotencyKey": key},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "bearerFormat": "drums_sk_…"}},
        },
    }
