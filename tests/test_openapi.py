"""The OpenAPI document: it validates, it is strict, and it says what the routes do."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from drums.errors import ConfigError
from drums_core.daemon import openapi, requests
from drums_core.daemon.codec import parse_json, structure, structure_query
from drums_core.daemon.problems import MalformedJson
from drums_core.daemon.routes import OPERATIONS

DOCUMENT = openapi.document(OPERATIONS)


def schema_errors(name: str, value: object) -> list[str]:
    """What a value breaks of a component's schema."""
    from jsonschema import Draft202012Validator

    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return [e.message for e in Draft202012Validator(schema).iter_errors(value)]


def test_it_validates() -> None:
    """As OpenAPI 3.1, by the independent validator; and it is JSON."""
    from openapi_spec_validator import OpenAPIV31SpecValidator

    assert list(OpenAPIV31SpecValidator(json.loads(json.dumps(DOCUMENT))).iter_errors()) == []
    assert DOCUMENT["openapi"].startswith("3.1")


def test_it_is_strict() -> None:
    """Every object that has fields admits no others."""
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert schema["additionalProperties"] is False, name
        assert schema["description"], name


def test_every_route_is_there() -> None:
    """One entry per route, with an id of its own, a summary, a token, and a problem for whatever goes wrong."""
    entries = {(m, p): e for p, methods in DOCUMENT["paths"].items() for m, e in methods.items()}
    assert len(entries) == len(OPERATIONS) == len({e["operationId"] for e in entries.values()})
    for key, entry in entries.items():
        assert entry["summary"], key
        problem = entry["responses"]["default"]["content"]["application/problem+json"]["schema"]
        assert problem == {"$ref": "#/components/schemas/Problem"}
        assert ("security" in entry) is (key == ("get", "/v1/health")), key


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.mutating], ids=lambda o: o.name)
def test_mutating_routes_take_a_key(operation: Any) -> None:
    """They name the idempotency key."""
    entry = DOCUMENT["paths"][operation.path][operation.method.lower()]
    assert {"$ref": "#/components/parameters/IdempotencyKey"} in entry["parameters"]


GOOD: list[tuple[type, dict[str, Any]]] = [
    (requests.CreateSlot, {}),
    (requests.CreateSlot, {"task": "2e208cb7", "ttl": None, "network": "none"}),
    (requests.CreateSlot, {"image": "minimal", "checkpoint": None, "ttl": 600}),
    (requests.CreateSlot, {"labels": {"policy": "run-7/step 400"}}),
    (requests.ForkSlot, {"n": 2}),
    (requests.ExecuteInSlot, {"command": ["ls", "-l"], "timeout": 1.5}),
    (requests.ExecuteInSlot, {"command": "ls -l", "shell": True}),
    (requests.WaitForVerdict, {"timeout": 0}),
    (requests.ExtendSlot, {"ttl": None}),
]
BAD: list[tuple[type, dict[str, Any], set[str]]] = [
    (requests.CreateSlot, {"tsk": "x"}, {"$.tsk"}),
    (
        requests.CreateSlot,
        {"task": 5, "ttl": "60", "network": "nat", "more": 1},
        {"$.task", "$.ttl", "$.network", "$.more"},
    ),
    (requests.CreateSlot, {"ttl": 0}, {"$.ttl"}),
    (requests.CreateSlot, {"ttl": True}, {"$.ttl"}),
    (requests.CreateSlot, {"image": "x" * 65}, {"$.image"}),
    (requests.CreateSlot, {"image": "../minimal"}, {"$.image"}),
    (requests.CreateSlot, {"labels": {"policy": 7}}, {"$.labels.policy"}),
    (requests.CreateSlot, {"labels": {"policy": "x" * 201}}, {"$.labels.policy"}),
    (requests.CreateSlot, {"labels": {"not a name": "x"}}, {"$.labels.not a name"}),
    (requests.CreateSlot, {"labels": ["policy"]}, {"$.labels"}),
    (requests.ForkSlot, {"n": 0}, {"$.n"}),
    (requests.ForkSlot, {"n": 1.5}, {"$.n"}),
    (requests.ForkSlot, {"n": True}, {"$.n"}),
    (requests.SaveSlot, {}, {"$.name"}),
    (requests.SaveSlot, {"name": "x" * 65}, {"$.name"}),
    (requests.SaveSlot, {"name": ""}, {"$.name"}),
    (requests.StepSlot, {"action": None}, {"$.action"}),
    (requests.ExecuteInSlot, {"command": ["ls", 5, None]}, {"$.command[1]", "$.command[2]"}),
    (requests.ExecuteInSlot, {"command": {}, "shell": 1, "timeout": 0}, {"$.command", "$.shell", "$.timeout"}),
    (requests.WaitForVerdict, {"timeout": -1}, {"$.timeout"}),
    (requests.QuarantineSlot, {"reason": ""}, {"$.reason"}),
    (requests.ExtendSlot, {}, {"$.ttl"}),
    (requests.ExtendSlot, {"ttl": 10**400}, {"$.ttl"}),
]


@pytest.mark.parametrize(("kind", "body"), GOOD, ids=str)
def test_good_bodies(kind: type, body: dict[str, Any]) -> None:
    """What the routes take, the schema takes."""
    assert isinstance(structure(body, kind), kind)
    assert schema_errors(kind.__name__, body) == []


@pytest.mark.parametrize(("kind", "body", "paths"), BAD, ids=lambda x: str(x)[:60])
def test_bad_bodies(kind: type, body: dict[str, Any], paths: set[str]) -> None:
    """What the schema refuses, the routes refuse, and name every wrong place."""
    with pytest.raises(ConfigError) as caught:
        structure(body, kind)
    assert {e["path"] for e in caught.value.errors} == paths
    assert all(e["message"] and "\n" not in e["message"] for e in caught.value.errors)
    if body != {"ttl": 10**400}:  # a number to JSON Schema
        assert schema_errors(kind.__name__, body)


@pytest.mark.parametrize("text", ["\0", "\ud800"])
def test_text_that_is_none(text: str) -> None:
    """A NUL and a lone surrogate can be written in JSON, and are no text that a desktop can take."""
    with pytest.raises(ConfigError) as caught:
        structure({"action": text}, requests.StepSlot)
    assert caught.value.errors[0]["path"] == "$.action"


@pytest.mark.parametrize(
    "body",
    [b"{", b"[1]", b"5", b"null", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000, b"1" * 5000],
    ids=lambda b: repr(b[:12]),
)
def test_malformed_json(body: bytes) -> None:
    """What is no JSON object has a name of its own."""
    with pytest.raises(MalformedJson):
        parse_json(body)


def test_queries() -> None:
    """Parameters are text: whole numbers are read, everything else is told by its path."""
    assert structure_query([("limit", "7")], requests.EpisodesQuery) == requests.EpisodesQuery(limit=7)
    assert (
        structure_query([("all", "true")], requests.StatsQuery).all and not structure_query([], requests.StatsQuery).all
    )
    assert not structure_query([("all", "false")], requests.StatsQuery).all
    for text in ("yes", "1", "True", ""):
        with pytest.raises(ConfigError) as caught:
            structure_query([("all", text)], requests.StatsQuery)
        assert caught.value.path == "$query.all"
    for pairs, path in (
        ([("limit", "x")], "$query.limit"),
        ([("limit", "0")], "$query.limit"),
        ([("limit", "1"), ("limit", "2")], "$query.limit"),
        ([("other", "1")], "$query.other"),
    ):
        with pytest.raises(ConfigError) as caught:
            structure_query(pairs, requests.EpisodesQuery)
        assert [e["path"] for e in caught.value.errors] == [path]
    with pytest.raises(ConfigError):
        structure_query([], requests.FileQuery)


def test_a_type_that_json_lacks() -> None:
    """The generator refuses what it cannot say, instead of leaving it out."""

    @attrs.frozen
    class Odd:
        """Odd."""

        value: complex

    with pytest.raises(TypeError, match="complex"):
        openapi.schema_of(Odd, {})
