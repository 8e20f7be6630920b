"""Reads a run's file of Weights & Biases: records of LevelDB's log format
(https://github.com/google/leveldb/blob/main/doc/log_format.md) behind seven bytes of their own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

OWN, BLOCK, HEADER = 7, 32 << 10, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator[Any]:
    """Each as wandb's own message."""
    data, at, kept = file.read_bytes(), OWN, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        piece, at = data[at + HEADER : at + HEADER + length], at + HEADER + length
        kept = kept + piece if kind in (MIDDLE, LAST) else piece
        if kind in (FULL, LAST):
            made = wandb_internal_pb2.Record()
            made.ParseFromString(kept)
            yield made


def history(file: Path) -> list[dict[str, Any]]:
    """The lines of the run's history; a nested key is joined by dots."""
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item}
        for one in records(file)
        if one.WhichOneof("record_type") == "history"
    ]
