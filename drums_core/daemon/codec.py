"""Bodies and queries into objects, strictly: no unknown field, no other type, and every wrong place is named."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

from drums.errors import ConfigError
from drums_core.daemon.problems import MalformedJson
from drums_core.daemon.requests import Bound

T = TypeVar("T")
_TRUTHS = {"true": True, "false": False}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return document


def parse_json(content: bytes) -> dict[str, Any]:
    """A JSON object; nothing at all is an empty one.

    Raises:
        MalformedJson: it is none.
    """
    if not content:
        return {}
    try:
        document = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as e:
        raise MalformedJson(f"the body is no JSON: {str(e) or type(e).__name__}") from e
    if not isinstance(document, dict):
        raise MalformedJson(f"the body is {type(document).__name__}, expected an object")
    return document


def structure(document: Mapping[str, Any], kind: type[T], *, root: str = "$") -> T:
    """An object of this class.

    Raises:
        ConfigError: the document is not one; `.errors` has path and message of every fault.
    """
    try:
        return _strict.structure(document, kind)
    except cattrs.BaseValidationError as e:
        raise _wrong(list(_faults(e, root))) from e


def structure_query(pairs: list[tuple[str, str]], kind: type[T]) -> T:
    """An object of this class from a query's parameters, which are text.

    Raises:
        ConfigError: as `structure`.
    """
    fields = {f.name: _plain_type(f.type) for f in attrs.fields(kind)}  # type: ignore[arg-type]
    document: dict[str, Any] = {}
    for name, text in pairs:
        if name in document:
            raise _wrong([{"path": f"$query.{name}", "message": "given twice"}])
        whole = fields.get(name) is int and re.fullmatch(r"-?[0-9]{1,18}", text)
        truth = _TRUTHS.get(text) if fields.get(name) is bool else None
        document[name] = int(text) if whole else text if truth is None else truth
    return structure(document, kind, root="$query")


def unstructure(value: object) -> Any:
    """A document as JSON."""
    return _strict.unstructure(value)


def _wrong(errors: list[dict[str, str]]) -> ConfigError:
    text = "; ".join(f"{e['path']}: {e['message']}" for e in errors)
    return ConfigError(f"the request is wrong: {text[:2000]}", path=errors[0]["path"], errors=errors)


def _faults(error: BaseException, path: str) -> Iterator[dict[str, str]]:
    if isinstance(error, ClassValidationError):
        noted, others = error.group_exceptions()
        for e, note in noted:
            yield from _faults(e, f"{path}.{note.name}")
        for e in others:
            yield from _faults(e, path)
    elif isinstance(error, IterableValidationError):
        indexed, others = error.group_exceptions()
        for e, index in indexed:
            key = index.index  # a list's number, or a name in an object
            yield from _faults(e, f"{path}.{key[:100]}" if isinstance(key, str) else f"{path}[{key}]")
        for e in others:
            yield from _faults(e, path)
    elif isinstance(error, ForbiddenExtraKeysError):
        for name in sorted(error.extra_fields):
            yield {"path": f"{path}.{name[:100]}", "message": "unknown field"}
    elif isinstance(error, KeyError):
        yield {"path": path, "message": "missing"}
    else:
        yield {"path": path, "message": str(error)[:500] or type(error).__name__}


# --- types


def _is_optional(kind: Any) -> bool:
    return type(None) in get_args(kind) and len(get_args(kind)) == 2


def _plain_type(kind: Any) -> Any:
    """The type below `Annotated` and `| None`."""
    if get_origin(kind) is Annotated:
        return _plain_type(get_args(kind)[0])
    if _is_optional(kind):
        return _plain_type(next(x for x in get_args(kind) if x is not type(None)))
    return kind


_JSON_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def _name_of(value: object) -> str:
    return "null" if value is None else _JSON_NAMES.get(type(value), type(value).__name__)


def _exactly(kind: type) -> Callable[[Any, Any], Any]:
    def check(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"expected {_JSON_NAMES[kind]}, got {_name_of(value)}")
        return value

    return check


def _text(value: Any, _: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected string, got {_name_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise ValueError("holds a lone surrogate, which is no text") from e
    if "\0" in value:
        raise ValueError("holds a NUL")
    return value


def _number(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"expected number, got {_name_of(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("is no finite number")
    return number


def _text_or_texts(value: Any, _: Any) -> str | list[str]:
    if type(value) is str:
        return _text(value, str)
    if type(value) is not list:
        raise ValueError(f"expected string or array of strings, got {_name_of(value)}")
    return _strict.structure(value, list[str])


def _bounded(kind: Any) -> Callable[[Any, Any], Any]:
    inner, *rest = get_args(kind)
    (bound,) = (x for x in rest if isinstance(x, Bound))

    def check(value: Any, _: Any) -> Any:
        return within(_strict.structure(value, inner), bound)

    return check


def within(value: Any, bound: Bound) -> Any:
    """The value.

    Raises:
        ValueError: it is out of its bounds; observed against allowed.
    """
    if bound.ge is not None and value < bound.ge:
        raise ValueError(f"is {value!r}, allowed is {bound.ge:g} or more")
    if bound.gt is not None and value <= bound.gt:
        raise ValueError(f"is {value!r}, allowed is more than {bound.gt:g}")
    if bound.le is not None and value > bound.le:
        raise ValueError(f"is {value!r}, allowed is up to {bound.le:g}")
    if bound.min_length is not None and len(value) < bound.min_length:
        raise ValueError(f"has {len(value)} characters, allowed are {bound.min_length} or more")
    if bound.max_length is not None and len(value) > bound.max_length:
        raise ValueError(f"has {len(value)} characters, allowed are up to {bound.max_length}")
    if bound.pattern is not None and not re.fullmatch(bound.pattern.removeprefix("^").removesuffix("$"), value):
        raise ValueError(f"{value!r} does not match {bound.pattern}")
    return value


def _is_bounded(kind: Any) -> bool:
    return get_origin(kind) is Annotated and any(isinstance(x, Bound) for x in get_args(kind)[1:])


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(str, _text)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(int, _exactly(int))
    converter.register_structure_hook(bool, _exactly(bool))
    converter.register_structure_hook_func(lambda kind: kind == str | list[str], _text_or_texts)
    converter.register_structure_hook_factory(_is_bounded, _bounded)
    return converter


_strict = _make_converter()
