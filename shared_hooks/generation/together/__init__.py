"""Continuous batching for any architecture: calls of one model run in lock-step and share what is row-wise.

together  `Together`: runs calls of one model at once
gate      what stands for the forward of a row-wise module

May import purity, state, modules, forward.
"""

from shared_hooks.generation.together.together import Ended, Outcome, Together

__all__ = ["Ended", "Outcome", "Together"]
