"""Find or install this host's CRIU: `python -m drums_core.criu_provider [STATE_DIR]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from drums.errors import DrumsError
from drums_core.config import DEFAULT_STATE_DIR
from drums_core.criu_provider.install import install_criu


def main() -> int:
    """Install, or say what is missing."""
    named = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("DRUMS_STATE_DIR")
    try:
        install_criu(Path(named) if named else DEFAULT_STATE_DIR, lambda line: print(line, file=sys.stderr, flush=True))
    except DrumsError as error:
        print(f"{error.message}\n({error.hint})" if error.hint else error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
