"""Videos made here, and a camera on loopback: MPEG-TS by TCP, or a real RTSP server with the same inside."""

from __future__ import annotations

import io
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import av
import numpy as np

from shared_hooks.frames import Pixels

WIDTH, HEIGHT = 64, 48
PACKET = 188


def picture(number: int) -> Pixels:
    """A grey that tells its number, up to 50, also after a lossy codec."""
    return np.full((HEIGHT, WIDTH, 3), 5 * (number % 51), np.uint8)


def number_of(pixels: Pixels) -> int:
    """Which `picture` it is."""
    return round(float(pixels.mean()) / 5)


def make_video(path: Path, frames: int = 20, codec: str = "libx264", rate: int | Fraction = 10, **options: str) -> Path:
    """A file of so many `picture`s; its suffix says the container."""
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
        container.mux(stream.encode())
    return path


def cut_in_half(path: Path) -> Path:
    """The same file, truncated."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def transport_stream(frames: int, rate: int = 25) -> list[bytes]:
    """MPEG-TS, the bytes of each frame: every one is whole in itself."""
    file = io.BytesIO()
    pieces = []
    with av.open(file, "w", format="mpegts", options={"flush_packets": "1"}) as container:
        stream = container.add_stream("mpeg2video", rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", 1
        done = 0
        for number in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
            pieces.append(file.getvalue()[done:])
            done = len(file.getvalue())
        container.mux(stream.encode())
    pieces.append(file.getvalue()[done:])
    return [piece for piece in pieces if piece]


class Streamer:
    """A camera at ``address``: to the first who connects it sends so many frames, ``seconds`` between them, and then
    closes (or falls silent, with ``hang``). ``pieces``: bytes in place of frames.
    """

    def __init__(
        self,
        frames: int = 60,
        seconds: float = 0.01,
        *,
        rtsp: bool = False,
        hang: bool = False,
        pieces: Sequence[bytes] | None = None,
    ) -> None:
        self._pieces = transport_stream(frames) if pieces is None else pieces
        self._seconds = seconds
        self._rtsp, self._hang = rtsp, hang
        self._over = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        self.address = f"rtsp://user:secret@127.0.0.1:{port}/live" if rtsp else f"tcp://127.0.0.1:{port}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._listening.close()
        self._thread.join(5)

    def _serve(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        with connection:
            try:
                if self._rtsp:
                    play(connection)
                numbers = count()
                for piece in self._pieces:
                    if self._over.wait(self._seconds):
                        return
                    connection.sendall(b"".join(rtp(piece, numbers)) if self._rtsp else piece)
                if self._hang:
                    self._over.wait()
            except OSError:
                pass


def rtp(piece: bytes, numbers: Iterator[int]) -> Iterator[bytes]:
    """MPEG-TS in RTP packets (RFC 2250), interleaved with RTSP (RFC 2326, 10.12)."""
    for start in range(0, len(piece), 7 * PACKET):
        payload = piece[start : start + 7 * PACKET]
        head = struct.pack(">BBHII", 0x80, 33, next(numbers) & 0xFFFF, int(time.monotonic() * 90000) & 0xFFFFFFFF, 7)
        yield struct.pack(">cBH", b"$", 0, len(head) + len(payload)) + head + payload


def play(connection: socket.socket) -> None:
    """An RTSP server's part of the conversation, until the client says PLAY."""
    sdp = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=camera\r\nt=0 0\r\nm=video 0 RTP/AVP 33\r\na=control:track\r\n"
    answers = {
        "OPTIONS": "Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN\r\n\r\n",
        "DESCRIBE": f"Content-Type: application/sdp\r\nContent-Length: {len(sdp)}\r\n\r\n{sdp}",
        "SETUP": "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n\r\n",
        "PLAY": "Session: 1\r\n\r\n",
    }
    lines = connection.makefile("rb")
    method = ""
    while method != "PLAY":
        method, number = lines.readline().decode().split(" ")[0], ""
        if not method:
            raise OSError("the client left")
        while (line := lines.readline().decode().strip()) != "":
            if line.lower().startswith("cseq:"):
                number = line
        connection.sendall(f"RTSP/1.0 200 OK\r\n{number}\r\n{answers[method]}".encode())


@contextmanager
def streaming(*args: Any, **keywords: Any) -> Iterator[str]:
    """The address of a `Streamer`, made of the same arguments."""
    camera = Streamer(*args, **keywords)
    try:
        yield camera.address
    finally:
        camera.close()
