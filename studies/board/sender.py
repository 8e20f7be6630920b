"""Stands in for a Jetson's GStreamer: a moving picture, sent to whoever connects to a port, one after the other."""

from __future__ import annotations

import itertools
import time

import av
import numpy as np

WIDTH, HEIGHT, RATE = 320, 240, 5


def main() -> None:
    """For ever."""
    while True:
        try:
            with av.open("tcp://127.0.0.1:5000?listen=1", "w", format="mpegts") as container:
                stream = container.add_stream("mpeg2video", rate=25)
                stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
                for number in itertools.count():
                    pixels = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
                    pixels[:, (number * 8) % WIDTH :] = 255
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
                    time.sleep(1 / RATE)
        except (av.FFmpegError, OSError) as error:
            print(error, flush=True)
            time.sleep(1)


if __name__ == "__main__":
    main()
