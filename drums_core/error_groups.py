"""The errors of tasks that ran side by side: a nursery puts them into groups, which say nothing themselves."""

from __future__ import annotations

from drums.errors import DrumsError


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside a group, and inside the groups in it; an error that is no group, as it is."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show for several tasks that failed together: one that a user can act on, if there is one."""
    found = leaves(group)
    return next((x for x in found if isinstance(x, DrumsError | OSError)), found[0])
