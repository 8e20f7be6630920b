"""A camera loop that always shows the newest frame's answer: old frames give way while a request is under way.

The camera here is made of the shipped pictures, 200 a second; `frames` may be any generator of arrays (OpenCV,
picamera2, GStreamer), height x width x 3, uint8, RGB.

cloud-server --model digits &
python examples/camera.py --server 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from edge_client import EdgeClient, sources

IMAGES = sorted(Path("shared_hooks/models/digits/images").glob("*.png"))


def frames(rate: float = 200.0) -> Iterator[sources.Pixels]:
    """The stand-in for a camera: it continues by itself, whether anybody looks or not."""
    for path in itertools.cycle(IMAGES):
        yield np.array(Image.open(path).convert("RGB"))
        time.sleep(1 / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--split", default="stage2.0.conv2", help='or "auto", "edge-only"')
    parser.add_argument("--frames", type=int, default=20)
    options = parser.parse_args()
    with EdgeClient(options.server, "digits", split=options.split) as client, sources.live(frames()) as camera:
        for number, answer in enumerate(client.infer_many(camera), 1):
            best = answer.result[0]
            print(f"{best.label}  {best.score:.0%}  {answer.measured_ns / 1e6:.1f} ms")
            if number == options.frames:
                break
        print(f"{number} frames answered; {camera.dropped} gave way to newer ones")


if __name__ == "__main__":
    main()
