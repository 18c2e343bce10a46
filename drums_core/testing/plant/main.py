"""The process that makes one fault: `python -I -S main.py JSON`.

The request names the file with the action (one of this folder, or a plugin's own), the function in it, and the desktop.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
import types
from pathlib import Path

_CORE = Path(__file__).resolve().parents[2]
NOT_HERE = 77
"""The exit code that says: this host has no such thing, so that there is nothing to try."""


def main() -> None:
    """Carry out the request of the first argument."""
    # The package without its `__init__`, which imports all of drums: nothing but what an action itself names is loaded.
    package = types.ModuleType("drums_core")
    package.__path__ = [str(_CORE)]
    sys.modules["drums_core"] = package
    from drums_core.testing.plant.target import NotHere, Target

    request = json.loads(sys.argv[1])
    target = Target(**request["target"])
    try:
        spec = importlib.util.spec_from_file_location("drums_planted", request["file"])
        if spec is None or spec.loader is None:
            raise LookupError(f"{request['file']!r} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, request["action"])(target, **request["arguments"])
    except NotHere as e:
        print(e)
        sys.exit(NOT_HERE)
    except (OSError, LookupError, ValueError, AttributeError, TypeError, ctypes.ArgumentError) as e:
        sys.exit(f"{request['action']}: {type(e).__name__}: {e}")


if __name__ == "__main__":
    main()
