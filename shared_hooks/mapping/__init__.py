"""The hierarchy map: what a model is made of, which parts ran, and where each node of its ONNX file comes from.

map_file     the module tree joined with what ran, as JSON and GraphML
onnx_export  ... as a graph whose nodes know where they come from
onnx_halves  head and tail as graphs of their own, read again
tape         what a run did, torch function by torch function, as a module that does it again
onnx_heads   heads as graphs, each from its tape
"""

from __future__ import annotations

from shared_hooks.mapping.map_file import (
    CallEntry,
    Coverage,
    HierarchyMap,
    ModuleEntry,
    OperationEntry,
    coverage_of,
    map_of,
    tags_of,
)

__all__ = ["CallEntry", "Coverage", "HierarchyMap", "ModuleEntry", "OperationEntry", "coverage_of", "map_of", "tags_of"]
