"""The cloud's side: runs what comes after the cut without computing what comes before. It uses no plan or recording.

tail         the model's own Python again, with results from the recipe
rehearsal    one run without data, which makes a recipe
meta_runner  kernels without data
recipe       what the tail does before the cut
recipe_book  recipes, made once and kept within limits

May import purity, forward, state, crossing, lifecycle, metrics, modules, tensors, errors.
"""

from shared_hooks.tail.recipe import Enter, GiveResult, ReadValue, Recipe, Run, Skip
from shared_hooks.tail.recipe_book import RecipeBook, RehearsalLimits, paid_by, payer
from shared_hooks.tail.tail import Substitutes, TailSession

__all__ = [
    "Enter",
    "GiveResult",
    "ReadValue",
    "Recipe",
    "RecipeBook",
    "RehearsalLimits",
    "Run",
    "Skip",
    "Substitutes",
    "TailSession",
    "paid_by",
    "payer",
]
