"""What a task needs, looked at before anything starts: its steps, one checker, and an image that it can be done in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drums.errors import ImageUnsuitable, TaskUnsupported, VerifierNotFound
from drums_core.abc import Checker
from drums_core.image.recipe import known_recipes
from drums_core.image.software import Software, images_with, recipe_with
from drums_core.model import PluginId, Task
from drums_core.plugins import Registry
from drums_core.setup import parse_steps

_NO_IMAGE = (
    "none that ships with drums; the setting `software` of the host adds a vendor's package to one "
    "(docs/install.md#software-that-debian-does-not-have)"
)


def checker_for(checkers: Mapping[str, tuple[Checker, PluginId]], task: Task) -> tuple[str, Checker, PluginId]:
    """The one checker that claims a task's evaluator.

    Raises:
        VerifierNotFound: none does, or several do.
    """
    claims = [(name, c, p) for name, (c, p) in checkers.items() if c.claims(task.evaluator)]
    if len(claims) != 1:
        func = task.evaluator.get("func")
        who = f"{' and '.join(n for n, _, _ in claims)} both claim" if claims else "no installed checker claims"
        raise VerifierNotFound(f"task {task.id!r}: {who} its evaluator {func!r}", task=task.id, func=func)
    return claims[0]


def require_supported(task: Task, registry: Registry, checkers: Mapping[str, tuple[Checker, PluginId]]) -> None:
    """Refuse a task that this host's plugins cannot set up or check.

    Raises:
        TaskUnsupported: its catalogue says so.
        ConfigError: a set-up step is unknown, or its parameters are wrong.
        VerifierNotFound: no checker claims its evaluator, or several do.
    """
    if not task.supported:
        raise TaskUnsupported(f"task {task.id!r} is not supported: {task.unsupported_reason}", task=task.id)
    parse_steps(registry, task.config, "config")
    _, checker, _ = checker_for(checkers, task)
    checker.validate(task)


def require_image(task: Task, image: str, software: Sequence[Software]) -> None:
    """Refuse a task that cannot be done in desktops of this image.

    Raises:
        ImageUnsuitable: it lacks an application (`.missing`), or the task is about the live web.
    """
    if image in known_recipes():  # one that an operator made is known to have what he put in it
        missing = sorted({*task.applications} - {*recipe_with(image, software).applications})
        if missing:
            suitable = images_with(task.applications, software)
            raise ImageUnsuitable(
                f"task {task.id!r} needs {', '.join(missing)}, which image {image!r} lacks",
                hint=f"images that have it: {', '.join(suitable) or _NO_IMAGE}",
                image=image,
                task=task.id,
                missing=missing,
                suitable=suitable,
            )
    if task.needs_web:
        raise ImageUnsuitable(
            f"task {task.id!r} needs the live web, and desktops of image {image!r} have no network",
            hint='no drums desktop has a network to the outside yet (network="none"), whatever its image: '
            "choose a task with `needs_web` false",
            image=image,
            task=task.id,
            missing=["network"],
        )
