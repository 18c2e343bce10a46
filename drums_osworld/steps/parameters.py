"""Checking the parameters of a step: exact types, no unknown key, and the path of each fault."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any, NewType, TypeVar, get_origin

import attrs
import cattrs
from cattrs import transform_error
from cattrs.cols import homogenous_tuple_structure_factory
from cattrs.v import format_exception

from drums.errors import ConfigError
from drums_core.model import Json

T = TypeVar("T", bound=attrs.AttrsInstance)

Flag = NewType("Flag", int)  # a bool, or the string "true" as five of OSWorld's steps have it
NO = Flag(0)


@attrs.frozen
class Command:
    """A command: a line, or a list of arguments."""

    value: str | tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments, a line split as a shell would."""
        if not isinstance(self.value, str):
            return self.value
        try:
            return tuple(shlex.split(self.value))
        except ValueError:
            return tuple(self.value.split())


def _command(value: object, _: object) -> Command:
    if isinstance(value, str) and value.strip():
        return Command(value)
    if isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        return Command(tuple(value))
    raise ValueError(f"expected a command line or a list of arguments, found {value!r:.60}")


def _flag(value: object, _: object) -> bool:
    if isinstance(value, bool):
        return value
    if value == "true":
        return True
    raise ValueError(f'expected true, false or "true", found {value!r:.60}')


def _text(value: object, _: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"expected a string, found {value!r:.60}")


def _number(value: object, _: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"expected a number, found {value!r:.60}")


def _whole(value: object, _: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"expected a whole number, found {value!r:.60}")


_converter = cattrs.Converter(forbid_extra_keys=True)
_converter.register_structure_hook(Command, _command)
_converter.register_structure_hook(Flag, _flag)
_converter.register_structure_hook(str, _text)
_converter.register_structure_hook(float, _number)
_converter.register_structure_hook(int, _whole)


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


@_converter.register_structure_hook_factory(_is_tuple)
def _lists(kind: Any, converter: cattrs.BaseConverter) -> Callable[[object, object], Any]:
    # cattrs would take a string for a list of its characters.
    inner = homogenous_tuple_structure_factory(kind, converter)

    def structure_list(value: object, _: object) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a list, found {value!r:.60}")
        return inner(value, kind)

    return structure_list


def describe(fault: BaseException, kind: type | None) -> str:
    """A fault in words: those of the functions above, else cattrs'."""
    text = str(fault)
    return text if isinstance(fault, ValueError) and text.startswith("expected ") else format_exception(fault, kind)


def structure(parameters: Mapping[str, Json], into: type[T], step_type: str) -> T:
    """The parameters as `into`.

    Raises:
        ConfigError: a wrong, a missing or an unknown one; `.faults` has all of them with their paths.
    """
    raw: Any = dict(parameters)
    try:
        return _converter.structure(raw, into)
    except cattrs.BaseValidationError as e:
        faults = transform_error(e, path="$.parameters", format_exception=describe)
        raise ConfigError(
            f"the parameters of a {step_type!r} step are wrong: {'; '.join(faults)}",
            path="$.parameters",
            faults=faults,
        ) from e
