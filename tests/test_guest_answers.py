"""What the guest server answers where OSWorld's clients and checkers look, on a throw-away desktop."""

from __future__ import annotations

from test_guest_server import Desktop, ask_json, desktop

__all__ = ["desktop"]  # the fixture


def test_lines_end_in_one_way(desktop: Desktop) -> None:
    """OSWorld's server reads text, in which Python makes every line's end one kind."""
    assert desktop.execute("printf 'a\\r\\nb\\rc\\n'")["output"] == "a\nb\nc\n"
    assert ask_json(desktop, "POST", "/run_bash_script", script="printf 'a\\r\\n'")[1]["output"] == "a\n"
