"""The hierarchy map: what a model is made of, which parts ran, and where each node of its ONNX file comes from.

joined       the static module tree with the calls and operations of one plan: `map_of`
tags         where a module is, as a path of class names
map_file     the map as JSON and GraphML
onnx_needs   the extra "onnx", or one clear line
onnx_flat    a model with tensors in and tensors out
onnx_export  ... as a graph whose nodes know where they come from
onnx_tags    tags on its nodes
onnx_halves  head and tail as graphs of their own
onnx_check   reads again what was written
"""

from __future__ import annotations

from shared_hooks.mapping.joined import CallEntry, HierarchyMap, ModuleEntry, OperationEntry, map_of
from shared_hooks.mapping.map_file import Coverage, coverage_of
from shared_hooks.mapping.tags import tags_of

__all__ = ["CallEntry", "Coverage", "HierarchyMap", "ModuleEntry", "OperationEntry", "coverage_of", "map_of", "tags_of"]
