"""OSWorld's evaluators without a desktop: which are refused, what a reward says of them, how scores add up."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_osworld_checker import RENAMED, make_checkout, task

from drums.errors import ConfigError, PrerequisiteError, VerifierNotFound
from drums_core.config import HostConfig
from drums_osworld import worker_job
from drums_osworld.checker import OSWorldChecker, checkout_commit


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    """A branch's, a packed one's, a detached one; of the folder or the one above; none where there is none."""
    git = tmp_path / ".git"
    (git / "refs/heads").mkdir(parents=True)
    assert checkout_commit(None) is None and checkout_commit(tmp_path) is None
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert checkout_commit(tmp_path) is None
    (git / "packed-refs").write_text(f"# pack-refs\n{'a' * 40} refs/heads/main\n")
    assert checkout_commit(tmp_path) == "a" * 40
    (git / "refs/heads/main").write_text("b" * 40 + "\n")
    assert checkout_commit(tmp_path) == checkout_commit(tmp_path / "inside") == "b" * 40
    (git / "HEAD").write_text("c" * 40 + "\n")
    assert checkout_commit(tmp_path) == "c" * 40


def test_validate_names_the_nearest() -> None:
    checker = OSWorldChecker(HostConfig())
    checker.validate(task(RENAMED))
    checker.validate(task({"func": "infeasible"}))
    with pytest.raises(VerifierNotFound, match="exact_match"):
        checker.validate(task({**RENAMED, "func": "exact_mach"}))
    with pytest.raises(VerifierNotFound, match="vm_command_line"):
        checker.validate(task({**RENAMED, "result": {"type": "vm_comand_line"}}))


@pytest.mark.parametrize(
    "change",
    [
        {"func": []},
        {"func": ["exact_match", 1]},
        {"conj": "xor"},
        {"func": ["exact_match"]},
        {"result": {}},
        {"result": {"type": 3}},
        {"expected": [{"type": "rule"}]},
        {"options": [{}]},
        {"postconfig": [{"parameters": {}}]},
        {"postconfig": {}},
    ],
)
def test_evaluator_that_does_not_fit_together_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"\$\.evaluator") as info:
        OSWorldChecker(HostConfig()).validate(task({**RENAMED, **change}))
    assert "$.evaluator" in info.value.path


def test_missing_package_is_a_prerequisite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PrerequisiteError, match=r"pip install --no-deps desktop-env==1\.0\.2"):
        OSWorldChecker(HostConfig()).validate(task(RENAMED))


def test_provenance_names_version_and_files() -> None:
    made = OSWorldChecker(HostConfig()).provenance(task(RENAMED))
    assert made["functions"] == ["exact_match"]
    assert made["desktop_env"] == "1.0.2"
    assert set(made["files"]) == {
        "desktop_env/evaluators/metrics/general.py",
        "desktop_env/evaluators/getters/general.py",
        "desktop_env/evaluators/getters/misc.py",
    }


def test_checkout_comes_before_the_installed_package(tmp_path: Path) -> None:
    checker = OSWorldChecker(HostConfig(osworld=make_checkout(tmp_path)))
    checker.validate(task({"func": "mine", "result": {"type": "x"}}))
    with pytest.raises(VerifierNotFound):
        checker.validate(task(RENAMED))


# Evaluation itself, on functions of this test.


def absent(env: object, config: Mapping[str, Any]) -> Any:
    raise FileNotFoundError(config["value"])


GETTERS: dict[str, Callable[..., Any]] = {"is": lambda env, config: config["value"], "absent": absent}
METRICS: dict[str, Callable[..., Any]] = {
    "same": lambda result, expected, factor=1: factor * (1.0 if result == expected else 0.0),
    "itself": lambda result, factor=1: result * factor,
}


def evaluate(evaluator: dict[str, Any]) -> Any:
    return worker_job.evaluate(evaluator, None, METRICS, GETTERS)


def values(*xs: Any) -> list[dict[str, Any]]:
    return [{"type": "absent" if x is None else "is", "value": x} for x in xs]


@pytest.mark.parametrize(
    ("conj", "results", "score"),
    [
        ("and", (1.0, 0.5), 0.75),
        ("and", (1.0, 0.0, 1.0), 0),
        ("and", (0.5, None), 0),
        ("and", (True, True), 1.0),
        ("or", (0.2, 0.6), 0.6),
        ("or", (0.0, 1.0, 5.0), 1),
        ("or", (0.3, None), 0.3),
    ],
)
def test_several_functions(conj: str, results: tuple[Any, ...], score: float) -> None:
    evaluator = {"func": ["itself"] * len(results), "conj": conj, "result": values(*results)}
    assert evaluate(evaluator) == score


def test_options_and_absence_of_one_function() -> None:
    result, expected = values(2, 2)
    assert evaluate({"func": "same", "result": result, "expected": expected, "options": {"factor": 0.5}}) == 0.5
    assert evaluate({"func": "itself", "result": values(0.5)[0], "expected": {}}) == 0.5
    assert evaluate({"func": "itself", "result": values(None)[0]}) == 0
    several = {"func": ["itself"] * 2, "result": values(0.5, 0.5), "options": [{"factor": 2}, None]}
    assert evaluate(several) == 0.75


def test_only_the_results_absence_scores() -> None:
    with pytest.raises(FileNotFoundError):
        evaluate({"func": "same", "result": values(1)[0], "expected": values(None)[0]})
    with pytest.raises(UnboundLocalError):  # as in OSWorld: there is no result that could be judged
        evaluate({"func": ["itself"], "conj": "or", "result": values(None)})
