"""What users write: tables of TOML, and ``module:name``.

table     a TOML table read key by key; errors name the key
targets   ``module:name`` -> the object

May import errors.
"""

from shared_hooks.config.table import Table, kind_of
from shared_hooks.config.targets import looks_like_target, lookup, resolve

__all__ = [
    "Table",
    "kind_of",
    "looks_like_target",
    "lookup",
    "resolve",
]
