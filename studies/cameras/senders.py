"""Processes that send pictures on loopback: 640 x 480 at 30 a second, for as long as the context lasts."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shared_hooks.errors import SpecError

RAW = "videotestsrc is-live=true pattern=ball ! video/x-raw,width=640,height=480,framerate=30/1"
H264 = f"{RAW} ! x264enc tune=zerolatency speed-preset=ultrafast key-int-max=30"
SYSTEM_PYTHON = "/usr/bin/python3"
"""It has GStreamer's bindings from the distribution."""

RTSP = """
import sys, gi
gi.require_version("Gst", "1.0"); gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer as Rtsp
Gst.init(None)
server, media, permissions, token = Rtsp.RTSPServer(), Rtsp.RTSPMediaFactory(), Rtsp.RTSPPermissions(), Rtsp.RTSPToken()
server.set_address("127.0.0.1"); server.set_service(sys.argv[1])
media.set_launch("( " + sys.argv[2] + " ! rtph264pay name=pay0 pt=96 )"); media.set_shared(True)
login = Rtsp.RTSPAuth()
token.set_string("media.factory.role", "user")
login.add_basic(Rtsp.RTSPAuth.make_basic("me", "secret"), token)
server.set_auth(login)
permissions.add_permission_for_role("user", "media.factory.access", True)
permissions.add_permission_for_role("user", "media.factory.construct", True)
media.set_permissions(permissions)
server.get_mount_points().add_factory("/cam", media); server.attach(None)
GLib.MainLoop().run()
"""

HTTP = """
import io, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from PIL import Image

class Camera(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        for number in range(100000):
            file = io.BytesIO()
            Image.new("RGB", (640, 480), (number % 256, 128, 64)).save(file, "JPEG")
            data = file.getvalue()
            head = b"--frame\\r\\nContent-Type: image/jpeg\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(data)
            self.wfile.write(head + data + b"\\r\\n")
            time.sleep(1 / 30)
    def log_message(self, *words): pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Camera).serve_forever()
"""


@contextmanager
def gstreamer(pipeline: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A pipeline into a TCP server that sends to whoever connects, from a whole picture on."""
    sink = f"tcpserversink host=127.0.0.1 port={port} recover-policy=keyframe sync-method=latest-keyframe"
    with process(["gst-launch-1.0", "-q", *f"{pipeline} ! {sink}".split()], port) as sender:
        yield sender


@contextmanager
def udp(pipeline: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A pipeline that sends whether anybody listens or not."""
    with process(["gst-launch-1.0", "-q", *f"{pipeline} ! udpsink host=127.0.0.1 port={port}".split()]) as sender:
        yield sender


@contextmanager
def rtsp(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """GStreamer's RTSP server; /cam is for the user "me" with the password "secret"."""
    with process([SYSTEM_PYTHON, "-c", RTSP, str(port), H264], port) as sender:
        yield sender


@contextmanager
def http(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """JPEGs one after the other in one answer, as many IP cameras and mjpg-streamer give them."""
    with process([sys.executable, "-c", HTTP, str(port)], port) as sender:
        yield sender


@contextmanager
def process(words: Sequence[str], port: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Runs until the context ends; begins when its port is open. Raises SpecError where the program is missing."""
    if shutil.which(words[0]) is None:
        raise SpecError(f"{words[0]} is missing")
    sender = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while port is not None and not listens(port):
            if sender.poll() is not None or time.monotonic() > until:
                raise SpecError(f"{' '.join(words)[:200]} does not come up")
            time.sleep(0.1)
        yield sender
    finally:
        sender.kill()
        sender.wait()


def listens(port: int) -> bool:
    """Whether somebody does, by the system's list: to connect would be to take a sender's first pictures."""
    wanted = f"0100007F:{port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        return any(words[1] == wanted and words[3] == "0A" for words in map(str.split, table))


def free_port() -> int:
    """One that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
