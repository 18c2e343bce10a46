"""Software that an operator adds to an image from another apt source than Debian's: the setting `software`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from drums.errors import ConfigError
from drums_core.image.recipe import Recipe, known_recipes, load_recipe
from drums_core.urls import without_credentials

_LINE = re.compile(
    r"deb[ \t]+\[(?P<options>[^]\n]*)\][ \t]+(https?|file):\S+[ \t]+(?P<suite>\S+)(?P<components>([ \t]+\S+)*)"
)
# Debian Policy, 5.6.1.
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_EXECUTABLE = re.compile(r"[\w][\w+.-]*")


@attrs.frozen
class Software:
    """Packages of one signed apt source, for one image.

    Args:
        image: the recipe whose image gets them.
        source: one line of sources.list(5). Its option `signed-by` names the file of the key that signs the source;
            besides that it may have `arch`. Nothing else is taken from the source than the packages that are named.
        packages: what is installed from it; what they depend on comes from Debian, unless it is named, too.
        applications: the executables that tasks may then rely on; by default those called like the packages.
    """

    image: str
    source: str
    packages: tuple[str, ...]
    applications: tuple[str, ...] = attrs.Factory(lambda self: self.packages, takes_self=True)

    def __attrs_post_init__(self) -> None:
        """Raises ValueError with what is wrong, and what is allowed."""
        if self.image not in known_recipes():
            raise ValueError(f"image is {self.image!r}, it must be one of {', '.join(known_recipes())}")
        line = _LINE.fullmatch(self.source)
        if line is None or bool(line["components"]) is line["suite"].endswith("/"):
            raise ValueError(
                f"source is {self.shown!r}, it must be 'deb [signed-by=KEYFILE] URL SUITE COMPONENT' with a URL of "
                "http, https or file"
            )
        words = line["options"].split()
        options = dict(word.partition("=")[::2] for word in words)
        # `trusted=yes` and its like would install what nobody has signed.
        if other := sorted({*options} - {"arch", "signed-by"}):
            raise ValueError(f"source has the option {other[0]!r}, it may have 'signed-by' and 'arch'")
        if len(options) < len(words):
            raise ValueError(f"source has an option twice: {line['options']!r}")
        if not options.get("signed-by", "").startswith("/"):
            raise ValueError("source lacks the option 'signed-by' with the whole path of the file of its key")
        if not self.packages:
            raise ValueError("packages is empty, it must name at least one")
        for word, shape, what in (
            *((package, _PACKAGE, "package") for package in self.packages),
            *((application, _EXECUTABLE, "application") for application in self.applications),
        ):
            if not shape.fullmatch(word):
                raise ValueError(f"{what}s has {word!r}, which is no name of one")

    @property
    def key(self) -> Path:
        """The file of the key that signs the source."""
        found = re.search(r"signed-by=(\S+?)[\s\]]", self.source)
        assert found is not None
        return Path(found[1])

    @property
    def shown(self) -> str:
        """The source without the credentials that its URL may have."""
        return without_credentials(self.source)

    def identity(self) -> bytes:
        """What an image that holds it depends on: the setting, and the key's content.

        Raises:
            ConfigError: the key cannot be read.
        """
        try:
            key = self.key.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"the key of the source {self.shown!r} cannot be read: {error.strerror}",
                hint="put the key there, as its vendor publishes it (.asc or .gpg); or take the source out of the "
                "setting `software`",
                path="$.software",
                source=self.shown,
            ) from error
        words = (self.image, self.source, *self.packages, "", *self.applications, hashlib.sha256(key).hexdigest())
        return "\0".join(words).encode() + b"\0"


def recipe_with(name: str, software: Iterable[Software]) -> Recipe:
    """The recipe of this name, with the applications that are added to its image here.

    Raises:
        ImageNotFound: there is none.
    """
    recipe = load_recipe(name)
    added = [x for one in software if one.image == name for x in one.applications]
    return attrs.evolve(recipe, applications=(*recipe.applications, *added))


def images_with(applications: Iterable[str], software: Sequence[Software]) -> list[str]:
    """The names of the recipes whose images here have all these executables, sorted."""
    wanted = {*applications}
    return [name for name in known_recipes() if wanted <= {*recipe_with(name, software).applications}]
