"""A program that a step calls and that is not there."""

from __future__ import annotations

from drums.errors import GuestError
from drums_core.abc import StepContext

_NOT_FOUND = 404


def goes_on_without(context: StepContext, error: GuestError) -> bool:
    """Whether a step goes on although the desktop could not do it; OSWorld logs everything and goes on.

    So it does where an agent has acted, who may have removed the program: that is the agent's, and the checker's to
    see. Before that the image lacks it, and the desktop would not be as its task wants it.
    """
    return context.has_acted and error.facts.get("guest_status") == _NOT_FOUND
