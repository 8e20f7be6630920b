"""What users write: tables of TOML, and ``module:name``.

table     a TOML table read key by key; errors name the key
targets   ``module:name`` -> the object
hosts     by which names requests may ask

May import errors.
"""

from shared_hooks.config.hosts import is_loopback, is_own, why_not
from shared_hooks.config.table import Table, kind_of
from shared_hooks.config.targets import looks_like_target, lookup, resolve

__all__ = [
    "Table",
    "is_loopback",
    "is_own",
    "kind_of",
    "looks_like_target",
    "lookup",
    "resolve",
    "why_not",
]
