"""Making a verifier package from the template in `template/`."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import drums
from drums.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
_LONGEST = 40
_SUFFIX = ".tmpl"  # so that the tree's own tools take no template for code


def create_package(name: str, target: Path) -> list[Path]:
    """Make the package of a new verifier.

    Args:
        name: as tasks will name it.
        target: the folder to make; it must not be there yet.

    Returns:
        The files that were made.

    Raises:
        ConfigError: the name is malformed, or the folder is there or cannot be made.
    """
    if len(name) > _LONGEST or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name for a verifier",
            hint=f"up to {_LONGEST} small letters and digits, words joined by - or _, a letter first",
            path="$.name",
        )
    minor = ".".join(drums.__version__.split(".")[:2])
    major, last = minor.split(".")
    words = {
        "@name@": name,
        "@module@": f"drums_verifier_{name.replace('-', '_')}",
        "@range@": f">={minor},<{major}.{int(last) + 1}",
    }
    try:
        target.mkdir(parents=True)
        return _fill(resources.files("drums_verifiers") / "template", target, words)
    except FileExistsError as e:
        raise ConfigError(f"{str(target)!r} is there already", hint="name another folder: --into", path="$.into") from e
    except OSError as e:
        raise ConfigError(f"{str(target)!r} cannot be made: {e}", path="$.into") from e


def _fill(template: Traversable, target: Path, words: dict[str, str]) -> list[Path]:
    made: list[Path] = []
    for item in sorted(template.iterdir(), key=lambda x: x.name):
        name = words["@module@"] if item.name == "module" else item.name.removesuffix(_SUFFIX)
        if item.is_dir():
            (target / name).mkdir()
            made += _fill(item, target / name, words)
            continue
        text = item.read_text(encoding="utf-8")
        for word, meant in words.items():
            text = text.replace(word, meant)
        (target / name).write_text(text, encoding="utf-8")
        made.append(target / name)
    return made
