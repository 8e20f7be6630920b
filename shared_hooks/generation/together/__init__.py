"""Continuous batching for any architecture: calls of one model run in lock-step and share what is row-wise.

together  `Together`: runs calls of one model at once
lockstep  each call a greenlet that waits at a gate until the others do
gate      what stands for the forward of a row-wise module
rows      whether a module's rows are independent of each other: proven, not guessed

May import purity, state, modules, forward.
"""

from shared_hooks.generation.together.lockstep import Ended, Outcome
from shared_hooks.generation.together.together import Together

__all__ = ["Ended", "Outcome", "Together"]
