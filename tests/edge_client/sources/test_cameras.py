"""A camera on loopback: MPEG-TS by TCP and RTSP; and what is no camera."""

from __future__ import annotations

import threading

import pytest

from edge_client import sources
from edge_client.sources import Frame, without_password
from shared_hooks.errors import InputMismatch, SpecError
from tests.edge_client.sources.streams import number_of, streaming, transport_stream


@pytest.mark.parametrize("rtsp", [False, True], ids=["tcp", "rtsp"])
def test_frames_until_the_camera_dies(rtsp: bool) -> None:
    with streaming(frames=60, rtsp=rtsp) as address, sources.camera(address, queue=100) as source:
        assert source.live and "secret" not in source.name
        seen: list[Frame] = []
        with pytest.raises(InputMismatch, match=r"the stream ended after \d+ frames: its sender closed it") as reported:
            for item in source:
                assert isinstance(item, Frame)
                seen.append(item)
        assert "secret" not in str(reported.value)
    numbers = [number_of(one.pixels) for one in seen]
    first = numbers[0]
    assert len(seen) > 10 and numbers == [(first + step) % 51 for step in range(len(seen))]
    assert [one.id.index for one in seen] == list(range(len(seen)))


def test_silent_camera_is_given_up() -> None:
    silent = pytest.raises(InputMismatch, match="nothing came within 0.5 s|no frame for 1 s")
    with streaming(frames=40, hang=True) as address, sources.camera(address, timeout=0.5) as source, silent:
        list(source)


def test_camera_can_be_closed_early() -> None:
    before = threading.active_count()
    with streaming(frames=400) as address:
        with sources.camera(address) as source:
            next(iter(source))
        assert threading.active_count() <= before + 1  # the streamer's


@pytest.mark.parametrize(
    ("where", "reported"),
    [
        ("/dev/video99", "no such camera: /dev/video99"),
        ("/dev/null", "/dev/null: "),
        (__file__, "is no camera: not a device"),
        ("gopher://cam/x", "gopher:// is not taken; take rtsp://"),
        ("file:///etc/passwd", "file:// is not taken"),
        ("rtsp://", "no host in it"),
        ("rtsp://cam:99999/x", "no port that there is"),
        ("tcp://127.0.0.1", "no port that there is"),
        ("RTSP://127.0.0.1:1/x", "Connection refused"),
        ("rtsp://me:secret@127.0.0.1:1/x?token=secret", "rtsp://me:***@127.0.0.1:1/x?...: Connection refused"),
        ("tcp://127.0.0.1:1", "Connection refused"),
    ],
)
def test_invalid_camera(where: str, reported: str) -> None:
    with pytest.raises(InputMismatch) as error:
        sources.camera(where, timeout=5)
    assert reported in str(error.value) and "secret" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("pieces", "reported"),
    [
        ([b"<html><body>It works!</body></html>\n" * 100], "it cannot be read as a video"),
        ([b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"], "it cannot be read as a video"),
        ([], "it cannot be read as a video"),
        (transport_stream(1), "the stream ended after 0 frames: its sender closed it or is gone"),
    ],
    ids=["a page", "a playlist", "nothing", "too little of a stream"],
)
def test_a_stream_of_something_else(pieces: list[bytes], reported: str) -> None:
    with streaming(pieces=pieces) as address, pytest.raises(InputMismatch, match=f"^{address}: {reported}"):
        sources.camera(address, timeout=5)


def test_wrong_words() -> None:
    for wrong in ({"size": (0, 480)}, {"timeout": 0}, {"size": (640, 480)}):
        with pytest.raises(SpecError):
            sources.camera("rtsp://127.0.0.1:1/", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("rtsp://a:b@c/d", "rtsp://a:***@c/d"),
        ("rtsp://a:b@x@c:55/d", "rtsp://a:***@c:55/d"),
        # what may be a password is hidden, be it a path
        ("rtsp://user:p@ss/w0rd@host/x", "rtsp://user:***@host/x"),
        ("rtsp://a:b@x@c:55/d@e", "rtsp://a:***@e"),
        ("rtsp://a:12#3@c/d", "rtsp://a:***@c/d"),
        ("rtsp://a:12?3@c/d", "rtsp://a:***@?..."),
        ("rtsp:///a:b@c/d", "rtsp:///a:***@c/d"),
        ("http://rtsp://a:b@c/d", "http://rtsp:***@c/d"),
        ("rtsp://relay:8554/rtsp://a:b@c/d", "rtsp://relay:***@c/d"),
        ("rtsp://a:655361/b@c", "rtsp://a:***@c"),
        # a host, so there is no login
        ("http://10.0.0.5:8080/live@main", "http://10.0.0.5:8080/live@main"),
        ("http://[fe80::1]:8080/live@main", "http://[fe80::1]:8080/live@main"),
        ("http://cam/a:b@c", "http://cam/a:b@c"),
        ("rtsp://a@c/d@e", "rtsp://a@c/d@e"),
        # an "@" after a "?": of a password or of the query, and neither is shown
        ("rtsp://a:b@c/d?token=e@f", "rtsp://a:***@?..."),
        ("rtsp://a@c/d?token=1:e@f", "rtsp://a@c/d?..."),
        ("http://c:80/d?token=1:e@f", "http://c:80/d?..."),
        ("http://c/d?pwd=1", "http://c/d?..."),
        ("rtsp://a:b/b@c/d", "rtsp://a:***@c/d"),
        ("rtsp://a:b?b#b@c/d", "rtsp://a:***@?..."),
        ("rtsp://a@c/d", "rtsp://a@c/d"),
        ("tcp://c:1", "tcp://c:1"),
        ("/dev/video0", "/dev/video0"),
    ],
)
def test_passwords_are_not_shown(address: str, shown: str) -> None:
    assert without_password(address) == shown
