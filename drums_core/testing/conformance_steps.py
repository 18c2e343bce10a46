"""The suite of a set-up step type, and that of the context which a step is given.

require(await check_step(Touch, good=[{"path": "a"}], bad=[{}, {"path": 7}]))
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from drums.errors import ConfigError, GuestError, SetupFailed
from drums_core.abc import CommandResult, Step, StepContext
from drums_core.model import Json
from drums_core.testing.cancelling import cancelled_everywhere
from drums_core.testing.conformance import Broken, Check, checked, checked_async, expect
from drums_core.testing.fake_context import FakeStepContext

Parameters = Mapping[str, Json]


async def check_step(
    factory: Callable[[], Step],
    *,
    good: Sequence[Parameters],
    bad: Sequence[Parameters],
    context: Callable[[], FakeStepContext] = FakeStepContext,
    asks_nothing: bool = False,
    always_fails: bool = False,
) -> list[Check]:
    """Every rule.

    Args:
        good: parameters that a task may give; the step can be carried out with each.
        bad: parameters that must be refused.
        context: makes a context in which `good` can be carried out.
        always_fails: the step is there to say that it cannot be done here: carrying it out is a `SetupFailed`.
        asks_nothing: the step asks nothing of its desktop, so that a silent one does not matter to it.
    """
    checks = [checked("it has `parse`, and an async `run`", lambda: _shape(factory()))]
    checks.append(Check("there are good and bad parameters", "" if good and bad else "none were given"))
    checks += [checked(f"it takes {p!r:.80}", lambda p=p: _takes(factory, p)) for p in good]  # type: ignore[misc]
    checks += [checked(f"it refuses {p!r:.80}", lambda p=p: _refuses(factory, p)) for p in bad]  # type: ignore[misc]
    unknown = {**(good[0] if good else {}), "drums_unknown_parameter": 1}
    checks.append(checked("it refuses a parameter that it does not know", lambda: _refuses(factory, unknown)))
    for parameters in good:
        name = f"{parameters!r:.80}"
        if always_fails:
            checks.append(
                await checked_async(f"it fails: {name}", _failing(factory, parameters, context, silent=False))
            )
            continue
        checks.append(await checked_async(f"it is carried out: {name}", _running(factory, parameters, context)))
        if not asks_nothing:
            rule = f"a desktop that does not answer fails it: {name}"
            checks.append(await checked_async(rule, _failing(factory, parameters, context)))

        async def cancelled(parameters: Parameters = parameters) -> None:
            await cancelled_everywhere(_running(factory, parameters, context))

        checks.append(await checked_async(f"it can be cancelled at any point: {name}", cancelled))
    return checks


def _shape(step: Step) -> None:
    expect(callable(getattr(step, "parse", None)), "there is no `parse`")
    expect(not inspect.iscoroutinefunction(step.parse), "`parse` must not be async")
    expect(inspect.iscoroutinefunction(getattr(step, "run", None)), "`run` must be an async method")


def _takes(factory: Callable[[], Step], parameters: Parameters) -> None:
    before = copy.deepcopy(parameters)
    first, second = factory().parse(parameters), factory().parse(parameters)
    expect(parameters == before, "`parse` changes the parameters that it is given")
    expect(first == second, "`parse` gives something else the second time")


def _refuses(factory: Callable[[], Step], parameters: Parameters) -> None:
    try:
        found = factory().parse(parameters)
    except ConfigError as e:
        path = e.facts.get("path")
        expect(isinstance(path, str) and path.startswith("$"), f"the ConfigError's path is {path!r}, $… is needed")
        return
    raise Broken(f"it took them, as {found!r:.80}; a ConfigError was to be raised")


def _running(
    factory: Callable[[], Step], parameters: Parameters, context: Callable[[], FakeStepContext]
) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        step = factory()
        await step.run(context(), step.parse(parameters))

    return run


def _failing(
    factory: Callable[[], Step], parameters: Parameters, context: Callable[[], FakeStepContext], *, silent: bool = True
) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        step, fake = factory(), context()
        fake.silent = silent
        try:
            await step.run(fake, step.parse(parameters))
        except (GuestError, SetupFailed):
            return
        raise Broken("it went on as if all was well; GuestError or SetupFailed was to be raised")

    return run


FOLDER = "drums-suite"
SUITE_COMMANDS: Sequence[tuple[str | list[str], CommandResult]] = (
    (["/bin/echo", "$HOME"], CommandResult(0, "$HOME\n", "")),
    ("echo $HOME; echo no >&2; exit 3", CommandResult(3, "/home/user\n", "no\n")),
    (["/usr/bin/id", "-u"], CommandResult(0, "1000\n", "")),
    (["/bin/cat", f"/home/user/{FOLDER}/deep/up"], CommandResult(0, "second\n", "")),
)
"""What a fake context has to answer for `check_step_context`."""


async def check_step_context(context: StepContext) -> list[Check]:
    """Every rule of a context, on a fresh desktop, or on a fake that answers `SUITE_COMMANDS`."""

    async def says(command: str | list[str], *, shell: bool = False) -> CommandResult:
        return await context.execute(command, shell=shell)

    async def words() -> None:
        expect((await says(["/bin/echo", "$HOME"])).output == "$HOME\n", "a list went through a shell")

    async def line() -> None:
        found = await says("echo $HOME; echo no >&2; exit 3", shell=True)
        expect((found.returncode, found.output, found.error) == (3, "/home/user\n", "no\n"), f"it came to {found}")

    async def user() -> None:
        expect((await says(["/usr/bin/id", "-u"])).output == "1000\n", "it does not run as the agent's user")

    async def uploads() -> None:
        for content in (b"first, and longer\n", b"second\n"):
            await context.upload(f"{FOLDER}/deep/up", content)
        found = await says(["/bin/cat", f"/home/user/{FOLDER}/deep/up"])
        expect(found.output == "second\n", f"the file holds {found.output!r}, {found.error!r}")

    async def no_window() -> None:
        expect(await context.activate_window("drums no such window") is False, "activate_window was to be false")
        expect(await context.close_window("drums no such window", strict=True) is False, "close_window was to be false")

    async def no_file() -> None:
        with trio.fail_after(60):
            try:
                await context.open_file("/home/user/drums-no-such-file.txt", timeout_s=5)
            except SetupFailed:
                return
        raise Broken("a SetupFailed was to be raised")

    async def no_download() -> None:
        url = "ftp://a.example/drums-no-such-file.txt"  # of no kind that is fetched, so that nobody is asked
        try:
            await context.fetch(url)
        except SetupFailed as e:
            expect(url in e.message, f"the error does not name the URL: {e.message}")
            return
        raise Broken("a SetupFailed was to be raised")

    async def outputs() -> None:
        context.keep_output("suite.txt", "text")
        for name in ("", ".", "..", "a/b", "/etc/passwd"):
            try:
                context.keep_output(name, "text")
            except ConfigError:
                continue
            raise Broken(f"the name {name!r} was taken")

    async def screen() -> None:
        expect(all(type(x) is int and x > 0 for x in context.screen), f"the screen is {context.screen}")
        context.note("a remark")

    rules = {
        "a list is no shell's": words,
        "a line is the shell's, with code and both streams": line,
        "commands run as the agent's user": user,
        "a file is written, with its folders, over an old one": uploads,
        "a window that is not there is told": no_window,
        "a file that is not there cannot be opened": no_file,
        "a file that cannot be had is told with its URL": no_download,
        "outputs are kept under plain names alone": outputs,
        "there is a screen, and a remark is taken": screen,
    }
    return [await checked_async(rule, function) for rule, function in rules.items()]
