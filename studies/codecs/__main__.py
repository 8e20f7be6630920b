"""What codecs save and what they lose, on trained models.

    python -m studies.codecs rates                      digits at its middle cuts, by every codec that needs no book
    python -m studies.codecs basis                      digits at its middle cuts, by steps of the codec "basis"
    python -m studies.codecs frames                     differences of frames against each frame alone
    python -m studies.codecs sentences --model FOLDER   MiniLM's sentence embeddings: FOLDER holds config.json,
                                                        model.safetensors and tokenizer.json
    python -m studies.codecs ... --json FILE            adds the result to FILE, under its name

Books are learnt from training images, or from one half of the sentences; the figures are of images and sentences that
they have not seen.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

STUDIES = ("rates", "basis", "frames", "sentences")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "studies.codecs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=STUDIES)
    parser.add_argument("--model", type=Path, help="of sentences: where MiniLM lies")
    parser.add_argument("--quick", action="store_true", help="a tenth of the images")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    study = importlib.import_module(f"studies.codecs.{given.what}")
    found: list[dict[str, Any]] = study.run(given)
    if given.json:
        kept = json.loads(given.json.read_text()) if given.json.exists() else {}
        kept[given.what] = found
        given.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
