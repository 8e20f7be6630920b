"""The hierarchy map: what a model is made of, what of it ran, and where each node of its ONNX file comes from.

`map_of` joins the static module tree with the calls and operations of one plan; `coverage_of` says what is only in the
one, only in the other, or in both. The modules named ``onnx_*`` need ``pip install "isthmus[onnx]"``, the others not.
"""

from __future__ import annotations

from shared_hooks.mapping.coverage import Coverage, coverage_of
from shared_hooks.mapping.joined import CallEntry, HierarchyMap, ModuleEntry, OperationEntry, map_of
from shared_hooks.mapping.tags import tags_of

__all__ = ["CallEntry", "Coverage", "HierarchyMap", "ModuleEntry", "OperationEntry", "coverage_of", "map_of", "tags_of"]
