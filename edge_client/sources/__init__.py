"""Where inputs come from: files of a folder, frames of a video, frames of a camera. docs/sources.md

    with sources.camera("/dev/video0") as frames, EdgeClient("cloud:50051", "digits", split="relu") as client:
        for answer in client.infer_many(frames, prepare=client.spec.preprocess):
            ...

opening      which source the words of a command line name
cameras     a V4L2 device, or a stream from the network
videos      a video file; frames out of PyAV; its errors by name
source      what all of them are: `Source`; image and tensor files; frames a second; PyAV, where it is installed

A source that waits (files, videos) drops nothing. A live one keeps the newest frames. Loads PyAV when a video or a
camera is opened. No module has the name of a function here, which would stand before it.
"""

from edge_client.sources.cameras import camera, live
from edge_client.sources.source import Item, Source, Tally, folder
from edge_client.sources.videos import video
from shared_hooks.frames import Frame, FrameId, Pixels

__all__ = ["Frame", "FrameId", "Item", "Pixels", "Source", "Tally", "camera", "folder", "live", "video"]
