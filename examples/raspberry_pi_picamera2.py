"""Frames of a Raspberry Pi's camera by picamera2, through a cut. docs/sources.md says what it needs.

python examples/raspberry_pi_picamera2.py --server HOST:PORT --model SPEC --split LAYER
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from picamera2 import Picamera2

from edge_client import EdgeClient, sources


def frames(width: int, height: int) -> Iterator[sources.Pixels]:
    """RGB frames. libcamera's BGR888 lies in memory as red, green, blue."""
    camera = Picamera2()
    camera.configure(camera.create_video_configuration(main={"size": (width, height), "format": "BGR888"}))
    camera.start()
    try:
        while True:
            yield camera.capture_array("main")
    finally:
        camera.stop()
        camera.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", help="HOST:PORT; not needed with --split edge-only")
    parser.add_argument("--model", default="digits")
    parser.add_argument("--split", default="edge-only")
    parser.add_argument("--frames", type=int, default=100)
    options = parser.parse_args()
    client = EdgeClient(options.server, options.model, split=options.split)
    assert client.spec is not None
    with client, sources.live(frames(640, 480), "picamera2", timeout=10) as source:
        tally = sources.SourceTally(source)
        for answer in client.infer_many(source, prepare=client.spec.preprocess):
            tally.add()
            print(client.spec.postprocess(answer.output)[:1], tally.line())
            if tally.answered == options.frames:
                break
        tally.stop()
        print(tally.summary())


if __name__ == "__main__":
    main()
