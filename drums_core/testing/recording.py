"""A recording system layer: plans of privileged operations are kept instead of carried out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import attrs

from drums_core.sys import helper
from drums_core.sys.helper import Plan, plan_descriptor


@attrs.define
class RecordingSystem:
    """Stands in for the helper process (`drums_core.sys.helper`) of every plan.

    Args:
        plans: the plans that were handed over, in order.
        code: what the helpers end with; 0 is success.
        output: what they print: with another code it is the text of the `OSError`.
    """

    plans: list[Plan] = attrs.field(factory=list)
    code: int = 0
    output: str = ""

    def operations(self, name: str) -> Plan:
        """The operations of this name, of all plans."""
        return [operation for plan in self.plans for operation in plan if operation[0] == name]

    def fail(self, output: str, code: int = 125) -> None:
        """Let the next helpers fail as the real one does, with its text: `drums-enter: mount: [Errno 28] …`."""
        self.code, self.output = code, output


@contextmanager
def recording_system() -> Iterator[RecordingSystem]:
    """Until the end of the block, no plan of this process is carried out."""
    recorder = RecordingSystem()

    @contextmanager
    def descriptor(plan: Plan) -> Iterator[int]:
        recorder.plans.append([list(operation) for operation in plan])
        with plan_descriptor(plan) as fd:
            yield fd

    def argv(plan_fd: int) -> list[str]:
        return ["/bin/sh", "-c", f"printf %s {shlex.quote(recorder.output)}; exit {recorder.code}"]

    with mock.patch.object(helper, "plan_descriptor", descriptor), mock.patch.object(helper, "helper_argv", argv):
        yield recorder
