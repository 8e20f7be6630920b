"""Python state: everything besides tensors that code can change, compared and restored.

python_state  what a model's code can reach, at one time
walk          how that is found
probes        the state of objects written in C, and of functools.lru_cache; random number generators
agreed        changes of a model since two sides agreed on it
reach         which code a forward may run, and what it reads

May import modules, errors.
"""

from shared_hooks.state.probes import Dice, DiceWatch
from shared_hooks.state.python_state import (
    PLAIN,
    Numbers,
    PythonState,
    Settings,
    Spot,
    agree,
    entries,
    first_few,
    is_read,
    lasting,
    lasting_name,
    lost,
    poisoned,
    portable,
    remains,
    spread,
)
from shared_hooks.state.reach import MISSING, Reach, StateChange, attribute_in, held_by_code
from shared_hooks.state.walk import PoisonRead

__all__ = [
    "MISSING",
    "PLAIN",
    "Dice",
    "DiceWatch",
    "Numbers",
    "PoisonRead",
    "PythonState",
    "Reach",
    "Settings",
    "Spot",
    "StateChange",
    "agree",
    "attribute_in",
    "entries",
    "first_few",
    "held_by_code",
    "is_read",
    "lasting",
    "lasting_name",
    "lost",
    "poisoned",
    "portable",
    "remains",
    "spread",
]
