"""The trio runtime of drums: episodes, desktops, checkpoints, gates and the plugins that make them up.

Layers, imports pointing one way: `drums` <- `drums_core` <- `drums_gates`, `drums_verifiers`, `drums_osworld`.
The core finds those three by entry point, like anybody's plugin.
"""

from drums_core.config import HostConfig, load_config
from drums_core.hookspecs import hookimpl
from drums_core.host import Host
from drums_core.model import Reward, Task, Verdict
from drums_core.opening import open_host
from drums_core.plugins import build_manager
from drums_core.slot import Slot
from drums_core.slot_state import SlotState

__all__ = [
    "Host",
    "HostConfig",
    "Reward",
    "Slot",
    "SlotState",
    "Task",
    "Verdict",
    "build_manager",
    "hookimpl",
    "load_config",
    "open_host",
]
