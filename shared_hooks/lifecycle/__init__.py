"""The life of the two processes as stages, with hooks that users can add.

stages    `Stage`: where hooks are called, when, and with what
registry  `Lifecycle`: registers, removes, loads, lists (also as text), and calls hooks
log       the default hook, which logs what happens, within limits
"""

from shared_hooks.lifecycle.log import on_behalf_of as on_behalf_of
from shared_hooks.lifecycle.registry import Lifecycle as Lifecycle
from shared_hooks.lifecycle.registry import Listed as Listed
from shared_hooks.lifecycle.registry import Priority as Priority
from shared_hooks.lifecycle.registry import on as on
from shared_hooks.lifecycle.stages import About as About
from shared_hooks.lifecycle.stages import Event as Event
from shared_hooks.lifecycle.stages import Stage as Stage
from shared_hooks.lifecycle.stages import every_n_requests as every_n_requests
from shared_hooks.lifecycle.stages import every_n_seconds as every_n_seconds
from shared_hooks.lifecycle.stages import is_first as is_first
from shared_hooks.lifecycle.stages import is_last as is_last
