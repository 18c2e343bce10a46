"""Recipes: what an image holds, as documents that ship with drums."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources

import attrs
import cattrs

from drums.errors import ConfigError, ImageNotFound


@attrs.frozen(kw_only=True)
class Recipe:
    """What an image is made of.

    Attributes:
        name: the image's name, as `create(image=…)` takes it.
        description: one line for people.
        suite: Debian's code name.
        packages: Debian packages, without their recommendations.
        pip_packages: pure Python distributions, pinned, installed without dependencies.
        pip_wheels: the like, of which a wheel for the image's own Python and machine is installed.
        build_commands: command lines for a shell, run as root in the image once its files are there, without a network.
            `/opt/drums/build` is for them alone: it is removed afterwards.
        applications: executables that tasks may rely on.
        guest_args: arguments of the guest's `init.sh`.
    """

    name: str
    description: str
    suite: str
    packages: tuple[str, ...]
    pip_packages: tuple[str, ...] = ()
    pip_wheels: tuple[str, ...] = ()
    build_commands: tuple[str, ...] = ()
    applications: tuple[str, ...] = ()
    guest_args: tuple[str, ...] = ()


def known_recipes() -> tuple[str, ...]:
    """The names of the recipes that ship with drums, sorted."""
    folder = resources.files("drums_core.image") / "recipes"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


@functools.cache
def load_recipe(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        ImageNotFound: there is none; `.known` lists those that there are.
        ConfigError: the document does not fit a recipe.
    """
    known = known_recipes()
    if name not in known:
        raise ImageNotFound(
            f"no image recipe is called {name!r}",
            hint=f"known recipes: {', '.join(known)}",
            image=name,
            known=list(known),
        )
    return parse_recipe((resources.files("drums_core.image") / "recipes" / f"{name}.toml").read_text("utf-8"), name)


def parse_recipe(text: str, name: str) -> Recipe:
    """Structures a recipe's TOML text; `name` must be the name that it gives itself.

    Raises:
        ConfigError: with the path of the first fault in `.path`.
    """
    converter = cattrs.Converter(forbid_extra_keys=True)
    # cattrs' own hook for str calls str() on anything; a recipe with a number for a name is a fault.
    converter.register_structure_hook(str, _structure_str)
    try:
        recipe = converter.structure(tomllib.loads(text), Recipe)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {name!r} is not TOML: {error}", path="$") from error
    except (cattrs.BaseValidationError, TypeError, ValueError) as error:
        faults = cattrs.transform_error(error)
        path = faults[0].rpartition(" @ ")[2] if faults else "$"
        raise ConfigError(f"recipe {name!r} is malformed: {'; '.join(faults)}", path=path) from error
    if recipe.name != name:
        raise ConfigError(f"recipe {name!r} calls itself {recipe.name!r}", path="$.name")
    return recipe


def _structure_str(value: object, _: type) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
