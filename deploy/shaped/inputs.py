"""Tensors for the demo's edges: ``python inputs.py FOLDER COUNT``; one file of 1 x 3 x 224 x 224, under many names."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def main(folder: Path, count: int) -> None:
    """The folder is made; links take no room in a tmpfs."""
    folder.mkdir()
    first = folder / "000000.npy"
    np.save(first, np.random.default_rng(0).standard_normal((1, 3, 224, 224), dtype=np.float32))
    for number in range(1, count):
        (folder / f"{number:06}.npy").hardlink_to(first)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
