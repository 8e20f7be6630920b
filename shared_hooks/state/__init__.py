"""Python state: all that code can change besides tensors, compared and put back.

python_state   what a model's code can reach, as it is at one moment
walk           ... how it is found
places         ... where it is kept: compared, put back
lasting        which changes would affect a later run
reach          which code a forward may run
dice           generators of random numbers
numbers        plain values that may change between requests

May import modules, errors.
"""

from shared_hooks.state.dice import Dice, DiceWatch
from shared_hooks.state.lasting import (
    PLAIN,
    Read,
    agree,
    first_few,
    is_read,
    lasting_name,
    lost,
    portable,
    remains,
    spread,
)
from shared_hooks.state.numbers import Numbers, Spot
from shared_hooks.state.places import MISSING, Change
from shared_hooks.state.python_state import PythonState, Settings
from shared_hooks.state.reach import Reach

__all__ = [
    "MISSING",
    "PLAIN",
    "Change",
    "Dice",
    "DiceWatch",
    "Numbers",
    "PythonState",
    "Reach",
    "Read",
    "Settings",
    "Spot",
    "agree",
    "first_few",
    "is_read",
    "lasting_name",
    "lost",
    "portable",
    "remains",
    "spread",
]
