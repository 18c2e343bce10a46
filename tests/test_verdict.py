"""The rules of the verdict, as properties: of the pure function, and of an episode over its life."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from drums.errors import InvalidEpisode
from drums_core.episode import Episode
from drums_core.model import Cause, GateResult, Phase, PluginId, Status, Validity, Verdict
from drums_core.verdict import judge

PLUGIN = PluginId("p", "d", "1")
NAMES = ("a", "b", "c", "d", "e")
names = st.sampled_from(NAMES)
required_sets = st.sets(names, min_size=1)


def result(gate: str, status: Status, reason: str = "", cause: Cause | None = None) -> GateResult:
    return GateResult(gate, status, Phase.PRE_RESUME, PLUGIN, reason, cause)


results = st.builds(
    result,
    names,
    st.sampled_from(Status),
    st.sampled_from(["", "broken", "gone"]),
    st.one_of(st.none(), st.sampled_from(Cause)),
)
passes = st.builds(result, names, st.just(Status.PASS))


def expected(required: set[str], given_results: Sequence[GateResult]) -> Verdict:
    """The rules once more, in the words of the design."""
    if any(r.status is Status.FAIL for r in given_results):
        return Verdict.INVALID
    if all(any(r.gate == name and r.status is Status.PASS for r in given_results) for name in required):
        return Verdict.VALID
    return Verdict.PENDING


@given(required_sets, st.lists(results))
def test_the_three_rules(required: set[str], given_results: list[GateResult]) -> None:
    """Invalid once any gate failed, required or not; else valid when all required passed; else pending."""
    assert judge(required, given_results).verdict is expected(required, given_results)


@given(required_sets, st.lists(passes), names)
def test_nothing_is_valid_without_every_required_gate(
    required: set[str], given_results: list[GateResult], missing: str
) -> None:
    """Whatever else passed, and however often."""
    verdict = judge(required | {missing}, [r for r in given_results if r.gate != missing]).verdict
    assert verdict is Verdict.PENDING


@given(required_sets, st.lists(results), st.lists(results))
def test_invalid_is_final(required: set[str], before: list[GateResult], after: list[GateResult]) -> None:
    """No later result turns invalid back, takes a bad gate out, or changes what was said first."""
    first, later = judge(required, before), judge(required, before + after)
    if first.verdict is Verdict.INVALID:
        assert later.verdict is Verdict.INVALID
        assert later.bad_gates[: len(first.bad_gates)] == first.bad_gates
        assert later.invalid_reasons[: len(first.invalid_reasons)] == first.invalid_reasons


@given(required_sets, st.lists(results), st.randoms())
def test_order_does_not_matter(required: set[str], given_results: list[GateResult], random: object) -> None:
    """The verdict, the bad gates, the reasons and the causes are the same in any order of the results."""
    shuffled = list(given_results)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = judge(required, given_results), judge(required, shuffled)
    assert one.verdict is other.verdict
    for name in ("bad_gates", "invalid_reasons", "causes"):
        assert sorted(getattr(one, name)) == sorted(getattr(other, name))


@given(required_sets, st.lists(results))
def test_duplicates_do_not_matter(required: set[str], given_results: list[GateResult]) -> None:
    """A result that comes twice changes no verdict and is no second bad gate."""
    one, twice = judge(required, given_results), judge(required, given_results * 2)
    assert (one.verdict, one.bad_gates, one.causes) == (twice.verdict, twice.bad_gates, twice.causes)


@given(required_sets, st.lists(results))
def test_what_an_invalid_verdict_says(required: set[str], given_results: list[GateResult]) -> None:
    """Each failed gate once, a reason for each failure with the gate's name, a cause; and nothing otherwise."""
    validity = judge(required, given_results)
    failures = [r for r in given_results if r.status is Status.FAIL]
    assert set(validity.bad_gates) == {r.gate for r in failures}
    assert len(validity.bad_gates) == len(set(validity.bad_gates))
    assert [reason.partition(": ")[0] for reason in validity.invalid_reasons] == [r.gate for r in failures]
    assert all(reason.partition(": ")[2] for reason in validity.invalid_reasons)
    assert bool(validity.causes) is bool(failures)
    assert validity.valid is (validity.verdict is Verdict.VALID)


def episode(required: set[str], on_change: list[Validity] | None = None) -> Episode:
    said = [] if on_change is None else on_change
    return Episode(
        slot="s",
        origin="create",
        required={name: (Phase.PRE_RESUME, PLUGIN) for name in sorted(required)},
        on_change=lambda _, validity: said.append(validity),
    )


class EpisodeMachine(RuleBasedStateMachine):
    """An episode that gets results in batches, with what it told its observer."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Validity] = []
        self.required = {"a", "b", "c"}
        self.episode = episode(self.required, self.said)
        self.given: list[GateResult] = []
        self.was = [Verdict.PENDING]

    @rule(batch=st.lists(results.filter(lambda r: r.status is not Status.FAIL), max_size=4))
    def add_harmless(self, batch: list[GateResult]) -> None:
        self.add(batch)

    @rule(batch=st.lists(results, max_size=3))
    def add_anything(self, batch: list[GateResult]) -> None:
        self.add(batch)

    def add(self, batch: list[GateResult]) -> None:
        before, told = self.episode.validity, len(self.said)
        self.episode.add(batch)
        self.given += batch
        self.was.append(self.episode.validity.verdict)
        # The observer hears of each change, once, and of nothing else.
        assert self.said[told:] == ([self.episode.validity] if self.episode.validity != before else [])

    @invariant()
    def verdict_follows_the_rules(self) -> None:
        assert self.episode.validity == judge(self.required, self.given)
        assert self.episode.validity.verdict is expected(self.required, self.given)

    @invariant()
    def the_verdict_only_moves_forward(self) -> None:
        """Pending, then valid, then invalid; each may be left out, none comes back."""
        order = [Verdict.PENDING, Verdict.VALID, Verdict.INVALID]
        assert [order.index(v) for v in self.was] == sorted(order.index(v) for v in self.was)

    @invariant()
    def the_report_has_a_line_for_each_gate(self) -> None:
        report = self.episode.report()
        lines = {line["gate"]: line for line in report["gates"]["gates"]}
        assert len(lines) == len(report["gates"]["gates"])  # no gate twice
        assert list(lines)[:3] == sorted(self.required)
        assert set(lines) == self.required | {r.gate for r in self.given}
        for name, line in lines.items():
            states = {r.status for r in self.given if r.gate == name}
            if Status.FAIL in states:
                assert line["status"] == "fail"
            elif Status.PASS not in states:
                assert line["status"] == "pending"
            else:
                assert line["status"] == "pass"
            assert set(line["plugin"]) == {"name", "distribution", "version"}
        assert report["validity"]["verdict"] == self.episode.validity.verdict.value
        assert report["validity"]["bad_gates"] == [*self.episode.validity.bad_gates]
        assert {n for n, line in lines.items() if line["status"] == "fail"} == {*report["validity"]["bad_gates"]}

    @invariant()
    def waiters_are_woken_once_it_is_judged(self) -> None:
        assert self.episode._judged.is_set() is (self.was[-1] is not Verdict.PENDING)


EpisodeMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=15, deadline=None)
TestEpisodeMachine = EpisodeMachine.TestCase


async def test_wait_judged(autojump_clock: trio.testing.MockClock) -> None:
    """It returns at the verdict, valid or invalid, for every waiter, and at once when there is one."""
    for status, verdict in ((Status.PASS, Verdict.VALID), (Status.FAIL, Verdict.INVALID)):
        e = episode({"a"})
        seen: list[tuple[Verdict, float]] = []
        start = trio.current_time()

        async def wait(e: Episode = e, seen: list[tuple[Verdict, float]] = seen, start: float = start) -> None:
            seen.append(((await e.wait_judged()).verdict, trio.current_time() - start))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await trio.sleep(7)
            e.add([result("b", Status.PASS)])
            await trio.sleep(7)
            e.add([result("a", status)])
        await wait()
        assert seen == [(verdict, 14)] * 3


async def test_wait_judged_answers_the_verdict_of_the_moment() -> None:
    """Valid, then invalid before the waiter ran: it hears the later one."""
    e = episode({"a"})
    heard: list[Verdict] = []

    async def wait() -> None:
        heard.append((await e.wait_judged()).verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        e.add([result("a", Status.PASS)])
        e.add([result("no_app_crash", Status.FAIL, "crash")])
    assert heard == [Verdict.INVALID]


async def test_wait_valid(autojump_clock: trio.testing.MockClock) -> None:
    """Valid returns; invalid raises with gates and reasons; pending past the limit is a TimeoutError at the limit."""
    e = episode({"a"})
    start = trio.current_time()
    with pytest.raises(TimeoutError, match=r"still pending after 2\.5 s"):
        await e.wait_valid(2.5)
    assert trio.current_time() - start == pytest.approx(2.5)
    with pytest.raises(TimeoutError):
        await e.wait_valid(0)
    e.add([result("a", Status.PASS)])
    await e.wait_valid(0)
    await e.wait_valid()
    e.add([result("x", Status.FAIL, "it broke", Cause.AGENT)])
    for limit in (None, 0, 5):
        with pytest.raises(InvalidEpisode, match="x: it broke") as caught:
            await e.wait_valid(limit)
        assert (caught.value.bad_gates, caught.value.invalid_reasons) == (["x"], ["x: it broke"])


async def test_wait_valid_without_a_limit_waits(autojump_clock: trio.testing.MockClock) -> None:
    """As long as it takes."""
    e = episode({"a"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(e.wait_valid)
        await trio.sleep(80_000)
        e.add([result("a", Status.PASS)])


def test_the_first_failure_is_the_gates_line() -> None:
    """A pass gives way to a failure in the report; a later failure or pass does not replace the first failure."""
    e = episode({"a", "b"})
    first = result("a", Status.FAIL, "first", Cause.TASK)
    e.add([result("a", Status.PASS), first, result("a", Status.FAIL, "second"), result("a", Status.PASS)])
    [a, b] = e.report()["gates"]["gates"]
    assert (a["gate"], a["status"], a["reason"], a["cause"]) == ("a", "fail", "first", "task")
    assert (b["gate"], b["status"], b["phase"]) == ("b", "pending", "pre_resume")
    assert e.validity.invalid_reasons == ("a: first", "a: second")
