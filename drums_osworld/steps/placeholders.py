"""The placeholders that OSWorld puts values in for, in `execute` and `command` steps only."""

from __future__ import annotations

CLIENT_PASSWORD = "password"  # the desktop's sudo asks nobody; a set-up pipes this into it


def fill(text: str, screen: tuple[int, int]) -> str:
    """The text with every placeholder replaced; other braces stay.

    Args:
        text: an argument or a command line.
        screen: width and height in pixels.
    """
    width, height = screen
    values = {
        "CLIENT_PASSWORD": CLIENT_PASSWORD,
        "SCREEN_WIDTH_HALF": str(width // 2),
        "SCREEN_HEIGHT_HALF": str(height // 2),
        "SCREEN_WIDTH": str(width),
        "SCREEN_HEIGHT": str(height),
    }
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text
