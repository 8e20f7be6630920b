"""Codecs in numpy make the very bytes that PyTorch's side makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.light_codecs import CODECS, encode
from shared_hooks.codecs import CODECS as TORCHS
from shared_hooks.codecs import Grain
from shared_hooks.errors import SpecError

SHAPES = st.one_of(
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 70)),
    st.tuples(st.integers(1, 900)),
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(CODECS)),
    SHAPES,
    st.integers(0, 2**31),
    st.sampled_from(["normal", "relu", "far", "zeros", "tiny", "nan", "huge", "sparse"]),
    st.sampled_from([np.float32, np.float64, np.float16]),
)
def test_the_same_bytes(name: str, shape: tuple[int, ...], seed: int, kind: str, dtype: type) -> None:
    made = np.random.default_rng(seed)
    values = made.standard_normal(shape)
    if kind == "relu":
        values = np.maximum(values, 0)
    elif kind == "far":
        values.reshape(-1)[:: max(1, values.size // 2)] *= 1e4
    elif kind == "zeros":
        values *= 0
    elif kind == "tiny":
        values *= 1e-30
    elif kind == "huge":
        values *= 1e30
    elif kind == "nan":
        values.reshape(-1)[0] = np.nan
    elif kind == "sparse":
        values[made.random(shape) < 0.95] = 0
    with np.errstate(all="ignore"):
        array = np.ascontiguousarray(values.astype(dtype))
    tensor = torch.from_numpy(array.copy()).reshape(-1)
    stride = torch.from_numpy(array).stride()
    wanted = TORCHS[name].encode(tensor, Grain.of(array.shape, tuple(stride)))
    found = encode(name, array)
    if wanted is None or len(wanted.data) >= array.nbytes:
        assert found is None
    else:
        assert found is not None
        assert found == (bytes(wanted.data), list(wanted.params))


def test_a_codec_that_is_none() -> None:
    with pytest.raises(SpecError, match="int8"):
        encode("int9", np.zeros(100, np.float32))
    assert encode("int8", np.zeros(0, np.float32)) is None
