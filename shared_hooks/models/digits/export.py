"""Write the digits as PNG files: ``python -m shared_hooks.models.digits.export DIR`` makes DIR/training, DIR/held_out.

The images that ship beside this file are the first of the held-out ones; scikit-learn, which carries them all, is
needed. Names carry the truth (`data.DigitImage.file_name`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from shared_hooks.models.digits.train import load_images


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shared_hooks.models.digits.export", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args(arguments).folder
    for name, images in zip(("training", "held_out"), load_images(), strict=True):
        into = folder / name
        into.mkdir(parents=True, exist_ok=True)
        for image in images:
            Image.fromarray(image.pixels).save(into / image.file_name)
        print(f"{into}: {len(images)} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
