"""Frames of a GStreamer pipeline, such as a Jetson's camera, through a cut. docs/sources.md says what it needs.

python examples/jetson_gstreamer.py --server HOST:PORT --model SPEC --split LAYER --camera "nvarguscamerasrc ! ..."
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import gi
import numpy as np

gi.require_version("Gst", "1.0")
from gi.repository import Gst  # noqa: E402 - the version has to be said first

from edge_client import EdgeClient, sources  # noqa: E402

JETSON = (
    "nvarguscamerasrc ! video/x-raw(memory:NVMM),width=1280,height=720,framerate=30/1"
    " ! nvvidconv ! video/x-raw,width=640,height=360,format=BGRx"
)
TEST = "videotestsrc is-live=true ! video/x-raw,width=640,height=360,framerate=30/1"


def frames(camera: str) -> Iterator[sources.Pixels]:
    """RGB frames of ``camera``, a piece of a pipeline that ends in raw video."""
    Gst.init(None)
    sink = "appsink name=sink max-buffers=1 drop=true"
    pipeline = Gst.parse_launch(f"{camera} ! videoconvert ! video/x-raw,format=RGB ! {sink}")
    pipeline.set_state(Gst.State.PLAYING)
    try:
        while (sample := pipeline.get_by_name("sink").emit("pull-sample")) is not None:  # None at the end
            form, buffer = sample.get_caps().get_structure(0), sample.get_buffer()
            width, height = form.get_value("width"), form.get_value("height")
            rows = np.frombuffer(buffer.extract_dup(0, buffer.get_size()), np.uint8).reshape(height, -1)
            yield rows[:, : 3 * width].reshape(height, width, 3)  # rows may be padded
    finally:
        pipeline.set_state(Gst.State.NULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", help="HOST:PORT; not needed with --split edge-only")
    parser.add_argument("--model", default="digits")
    parser.add_argument("--split", default="edge-only")
    parser.add_argument("--camera", default=TEST, help=f'piece of a pipeline; on a Jetson "{JETSON}"')
    parser.add_argument("--frames", type=int, default=100)
    options = parser.parse_args()
    client = EdgeClient(options.server, options.model, split=options.split)
    assert client.spec is not None
    with client, sources.live(frames(options.camera), "gstreamer", timeout=10) as source:
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
