"""A zoo of small models: one class per awkward case, named after the case.

`CASES` lists them all; see :class:`tests.zoo.case.Case`. Modules are grouped by what is awkward about their models.
"""

from tests.zoo import (  # noqa: F401  (importing a module adds its models)
    attention,
    chains,
    constants,
    control,
    corners,
    dice,
    dtypes,
    filling,
    foreign,
    functional,
    giving,
    holders,
    hub,
    images,
    recurrent,
    reuse,
    skips,
    state,
    taking,
    transforms,
    vision,
    writing,
)
from tests.zoo.case import CASES, Call, Case

__all__ = ["CASES", "Call", "Case"]
