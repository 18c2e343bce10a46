"""`python -m drums` is the `drums` command."""

from __future__ import annotations

from drums.cli import main

if __name__ == "__main__":
    main()
