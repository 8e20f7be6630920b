"""The life of the two processes as stages, where you can add hooks without editing our code.

stages      `Stage`: where hooks are called, and what their events contain
events      `Event`, and `About` a request
registry    `Lifecycle`: registers, removes, lists, and dispatches
conditions  `every_n_requests`, `every_n_seconds`, `is_first`, `is_last`
log         the default hook: what happens, in the log
log_bounds  what a client may make of a log
listing     the hooks as lines of text
loading     hooks from a TOML table by dotted name, and from entry points
"""

from shared_hooks.lifecycle.conditions import every_n_requests as every_n_requests
from shared_hooks.lifecycle.conditions import every_n_seconds as every_n_seconds
from shared_hooks.lifecycle.conditions import is_first as is_first
from shared_hooks.lifecycle.conditions import is_last as is_last
from shared_hooks.lifecycle.events import About as About
from shared_hooks.lifecycle.events import Event as Event
from shared_hooks.lifecycle.log_bounds import on_behalf_of as on_behalf_of
from shared_hooks.lifecycle.registry import Lifecycle as Lifecycle
from shared_hooks.lifecycle.registry import Listed as Listed
from shared_hooks.lifecycle.registry import Priority as Priority
from shared_hooks.lifecycle.registry import on as on
from shared_hooks.lifecycle.stages import Stage as Stage
