"""schemathesis over the daemon's own OpenAPI document: whatever it makes up, the answer is no failure of the daemon's.

The runs are small, since some calls make desktops: enough to try each route with what the schema allows and forbids.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from requires import requires
from scratch import scratch_state
from test_daemon import Running, running
from test_openapi import DOCUMENT, schema_errors

from drums_core.daemon.routes import EVENTS, OPERATIONS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis")

pytestmark = requires("root", "criu")
# Streams do not end; one method of a port stands for all.
TRIED = [o for o in OPERATIONS if o.answer != EVENTS and (not o.of_port or o.method == "POST")]
HEAVY = {"create_slot", "fork_slot", "reset_slot", "save_slot", "verify_slot", "execute_slot", "step_slot"}
ALLOWED_5XX = {(503, "capacity_exhausted"), (502, "guest_error"), (502, "port_error")}
"""The host is full; the desktop does not answer, or lacks what is asked for (the accessibility tree)."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """A daemon of these tests' own."""
    with scratch_state() as config, running(config) as found:
        yield found
        assert found.stop() == 0


@pytest.mark.parametrize(
    ("name", "mode"),
    [(o.name, "positive") for o in TRIED]
    + [(o.name, "negative") for o in TRIED if o.path_parameters or o.query or o.body],
)
@pytest.mark.filterwarnings("ignore")
def test_no_failure_of_the_daemon(daemon: Running, name: str, mode: str) -> None:
    """No 5xx but those that say what the host or the desktop lacks; every answer is what the document says."""
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    (operation,) = [
        found.ok() for found in schema.get_all_operations() if found.ok().definition.raw["operationId"] == name
    ]
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    slot = daemon.create() if "{slot}" in operation.path and mode == "positive" else None

    @settings(
        max_examples=8 if name in HEAVY else 25,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def run(case: Any) -> None:
        if slot is not None:
            case.path_parameters = {**(case.path_parameters or {}), "slot": slot}
        if name == "wait_slot" and isinstance(case.body, dict):
            case.body["timeout"] = 0.01
        if name == "execute_slot" and isinstance(case.body, dict) and mode == "positive":
            case.body["timeout"] = 2.0
        headers = {"Authorization": f"Bearer {daemon.token}"}
        answer = case.call(base_url=f"http://127.0.0.1:{daemon.port}", headers=headers, timeout=60)
        if answer.status_code >= 400:
            problem = answer.json()
            assert schema_errors("Problem", problem) == []
            assert answer.status_code < 500 or (answer.status_code, problem["code"]) in ALLOWED_5XX, problem
        elif name == "create_slot":
            daemon.call("DELETE", f"/v1/slots/{answer.json()['id']}")
        elif name == "fork_slot":
            for child in answer.json()["slots"]:
                daemon.call("DELETE", f"/v1/slots/{child['id']}")

    try:
        run()
        assert daemon.good("GET", "/v1/health")["status"] == "ok"
    finally:
        if slot is not None:
            daemon.call("DELETE", f"/v1/slots/{slot}")
        for checkpoint in daemon.good("GET", "/v1/checkpoints")["checkpoints"]:
            if checkpoint["kind"] in ("saved", "end_state"):
                daemon.call("DELETE", f"/v1/checkpoints/{checkpoint['id']}")
