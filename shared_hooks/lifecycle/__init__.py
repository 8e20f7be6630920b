"""The life of the two processes as stages, where you can add hooks without editing our code.

stages    `Stage`: where hooks are called, when, and with what
registry  `Lifecycle`: registers, removes, loads, lists (as text, too), and dispatches
log       the default hook: what happens, in the log, within bounds
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
