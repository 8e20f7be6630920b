"""Map a model: its modules, which of them ran, and the origin of each node of its ONNX file.

map_file     the module tree with what ran, as JSON and GraphML
onnx_export  the model as an ONNX graph whose nodes have origins
onnx_halves  head and tail as separate graphs, and their validation
tape         the torch functions of a run, as a module that repeats them
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
