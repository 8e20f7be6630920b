"""What a request's header may say, before anything of it is read."""

from __future__ import annotations

import json

import pytest
import torch
import xxhash

from cloud_server.models.admission import MAX_LISTS, check_frontier
from shared_hooks import WrappedModel
from shared_hooks.errors import TooLarge


def test_a_header_of_many_lists_is_not_read() -> None:
    with WrappedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())) as edge:
        early = edge.head(0, torch.ones(1, 4))
    parcel = early.pack()
    size = len(b"".join(parcel.buffers))
    check_frontier(early.crossing, parcel.header, size, 1 << 20)
    body = json.dumps({**json.loads(parcel.header[8:]), "meta": [[]] * (MAX_LISTS + 100)}).encode()
    header = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body
    with pytest.raises(TooLarge, match="lists"):
        check_frontier(early.crossing, header, size, 1 << 20)
