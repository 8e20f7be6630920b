"""The inputs of a sweep: files, calls, the images that come with a model, or its example."""

from __future__ import annotations

from typing import Any, Final

from edge_client.call import Call
from edge_client.given import Given, given, named
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import BUILT_IN, ModelSpec, find_inputs

HANDFUL: Final = 5
"""Of the images that come with a model, as many, spread over all."""


def inputs_of(spec: ModelSpec, inputs: Any = None) -> list[Given]:
    """Those of --input; without any the shipped images, else the example. Raises SpecError when there is none."""
    if inputs is not None:
        try:
            return given(inputs)
        except InputMismatch as error:
            raise SpecError(f"--input: {error}") from error
    images = spec.folder / "images"
    if images.is_dir() and spec.folder in {path.parent.resolve() for path in BUILT_IN.values()}:
        found = find_inputs(images)
        return named(found[:: max(1, len(found) // HANDFUL)][:HANDFUL])
    example = spec.example()
    if example is None:
        raise SpecError(f"{spec.origin}: the spec has no example input; give inputs with --input")
    return [Given("example", value=Call(*example), made=True)]
