"""The inputs of a sweep: files, calls, the images that come with a model, or its example."""

from __future__ import annotations

from typing import Any, Final

from edge_client.call import Call
from edge_client.given import Given, given, named
from edge_client.spoken import either
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import BUILT_IN, ModelSpec, find_inputs

HANDFUL: Final = 5
"""How many of the images that come with a model are used, spread over all of them."""


def handed_over(inputs: Any) -> list[Given] | None:
    """Those of ``inputs``; None for None. Raises SpecError."""
    try:
        return None if inputs is None else given(inputs)
    except InputMismatch as error:
        raise SpecError(f"{either('--input', 'inputs')}: {error}") from error


def inputs_that_come_with(spec: ModelSpec) -> list[Given]:
    """The shipped images, else the example. Raises SpecError when there is none."""
    images = spec.folder / "images"
    if images.is_dir() and spec.folder in {path.parent.resolve() for path in BUILT_IN.values()}:
        found = find_inputs(images)
        return named(found[:: max(1, len(found) // HANDFUL)][:HANDFUL])
    example = spec.example()
    if example is None:
        raise SpecError(f"{spec.origin}: the spec has no example input; give {either('inputs with --input', 'inputs')}")
    return [Given("example", value=Call(*example), made=True)]
