"""Decoding sessions: a model's state behind a cut that stays here from one step to the next.

sessions  opened, stepped, forked, dropped

May import models, limits.
"""

from cloud_server.decoding.sessions import REASONS, Sessions, Step, Taken, Turn

__all__ = [
    "REASONS",
    "Sessions",
    "Step",
    "Taken",
    "Turn",
]
