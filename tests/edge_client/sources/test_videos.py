"""Real video files: every frame, in order, and one line about those that cannot be read."""

from __future__ import annotations

import gc
import sys
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_client import sources
from edge_client.sources import Frame, Video, naming_errors, open_source
from shared_hooks.config import Table
from shared_hooks.errors import InputMismatch, IsthmusError, SpecError
from shared_hooks.models import load_spec, spec_from_table
from shared_hooks.models.images import as_png
from tests.edge_client.sources.streams import HEIGHT, WIDTH, cut_in_half, make_video, number_of, picture


def numbers(source: sources.Source) -> list[int]:
    return [number_of(item.pixels) for item in source if isinstance(item, Frame)]


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "libx264"), ("a.mkv", "libx264"), ("a.avi", "mjpeg"), ("a.ts", "mpeg2video")]
)
def test_every_frame_in_the_order_in_which_they_are_shown(tmp_path: Path, name: str, codec: str) -> None:
    with sources.video(make_video(tmp_path / name, codec=codec, rate=25)) as source:
        assert numbers(source) == numbers(source) == list(range(20)), "nothing is dropped, and it starts again"
        assert (source.taken, source.dropped, source.live) == (40, 0, False)
        first = source.first()
    assert first.id.name == f"{name}#0" and first.pixels.shape == (HEIGHT, WIDTH, 3)


def test_time_and_truth_of_a_frame(tmp_path: Path) -> None:
    frames = list(sources.video(make_video(tmp_path / "walk_label7.mp4", frames=3)))
    assert [(one.id.seconds, one.id.truth) for one in frames if isinstance(one, Frame)] == [
        (0.0, "7"),
        (pytest.approx(0.1), "7"),
        (pytest.approx(0.2), "7"),
    ]


def test_a_telephones_video_is_turned_as_its_head_says(tmp_path: Path) -> None:
    path = make_video(tmp_path / "upright.mp4", frames=1)
    data = bytearray(path.read_bytes())
    # the display matrix of the track: a quarter clockwise (ISO 14496-12, 8.3.2)
    at = data.index(b"tkhd") + 4 + 4 + 20 + 16
    data[at : at + 36] = b"".join(
        value.to_bytes(4, "big", signed=True) for value in (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    )
    path.write_bytes(data)
    assert sources.video(path).first().pixels.shape == (WIDTH, HEIGHT, 3)


@pytest.mark.parametrize(
    ("name", "content", "reported"),
    [
        ("text.mp4", b"hello world\n" * 100, "it cannot be read as a video"),
        ("empty.mkv", b"", "it cannot be read as a video"),
        # lists of other files, which FFmpeg would open
        ("list.mp4", b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", "it cannot be read as a video"),
        ("join.mp4", b"ffconcat version 1.0\nfile '/etc/passwd'\n", "it cannot be read as a video"),
    ],
)
def test_invalid_video(tmp_path: Path, name: str, content: bytes, reported: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputMismatch, match=reported) as error:
        sources.video(tmp_path / name)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_one_that_is_not_there(tmp_path: Path) -> None:
    make_video(tmp_path / "walk.mp4", frames=1)
    with pytest.raises(InputMismatch, match=r"no such input: .*walt.mp4. Did you mean walk.mp4\?"):
        sources.video(tmp_path / "walt.mp4")
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(InputMismatch, match="folder.mp4"):
        sources.video(tmp_path / "folder.mp4")


def test_pictures_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_client.sources.MAX_PIXELS", 1000)
    with pytest.raises(InputMismatch, match="pictures of 64 x 48 pixels; at most 1000"):
        sources.video(make_video(tmp_path / "large.mp4", frames=1))


def test_sound_alone(tmp_path: Path) -> None:
    import av

    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.raises(InputMismatch, match="holds no video"):
        sources.video(tmp_path / "sound.mp4")


@pytest.mark.parametrize("options", [{}, {"movflags": "faststart"}, {"movflags": "frag_keyframe"}], ids=str)
def test_a_truncated_one_gives_what_is_there_and_says_so(tmp_path: Path, options: dict[str, str]) -> None:
    path = cut_in_half(make_video(tmp_path / "cut.mp4", 60, "mjpeg", **options))
    seen = []
    with pytest.raises(InputMismatch, match="truncated") as reported:
        for item in sources.video(path):
            seen.append(item)
    assert len(seen) < 60 and "cut.mp4" in str(reported.value)
    if "movflags" in options:  # its head is at the beginning
        assert len(seen) > 10 and f"after {len(seen)} frames" in str(reported.value)


@pytest.mark.parametrize(
    ("name", "codec", "rate", "frames"),
    [
        ("a.flv", "flv", 1, 6),
        ("a.flv", "flv", 1, 1),
        ("a.wmv", "wmv2", 1, 6),
        ("a.wmv", "wmv2", Fraction(1, 5), 1),
        ("a.mkv", "libx264", Fraction(1, 5), 6),
    ],
)
def test_a_whole_one_of_few_frames_is_not_called_truncated(
    tmp_path: Path, name: str, codec: str, rate: int | Fraction, frames: int
) -> None:
    with sources.video(make_video(tmp_path / name, frames, codec, rate)) as source:
        assert len(list(source)) == frames and not source.broken


def test_a_truncated_one_of_few_frames_is_reported(tmp_path: Path) -> None:
    source = sources.video(cut_in_half(make_video(tmp_path / "slow.flv", 20, "flv", 1)))
    with pytest.raises(InputMismatch, match="of 20.0 s: it is truncated"):
        list(source)


def test_an_error_in_the_middle_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import av.error

    path, calls = make_video(tmp_path / "a.mp4", frames=5), count()

    class ToPixels:
        def __call__(self, frame: Any) -> Any:
            if next(calls) < 4:  # one of them before: to see whether it can be read
                return picture(0)
            raise av.error.MemoryError(12, "Cannot allocate memory")

    monkeypatch.setattr("edge_client.sources.ToPixels", ToPixels)
    with pytest.raises(InputMismatch, match="a.mp4 after 3 frames: Cannot allocate memory"):
        list(sources.video(path))


def test_video_ended_without_a_timeout_is_reported() -> None:
    import av.error

    with pytest.raises(InputMismatch, match="a.mp4: Immediate exit requested"), naming_errors("a.mp4"):
        raise av.error.ExitError(1, "Immediate exit requested")
    with pytest.raises(InputMismatch, match="cam: nothing came within 2 s"), naming_errors("cam", 2):
        raise av.error.ExitError(1, "Immediate exit requested")


def test_no_pixels_are_kept(tmp_path: Path) -> None:
    for name in ("one.mp4", "two.mp4"):
        make_video(tmp_path / name, frames=2)

    def in_memory() -> int:
        gc.collect()  # of other tests
        return sum(type(one) is Frame for one in gc.get_objects())

    before = in_memory()
    with open_source([str(tmp_path)]) as source:
        assert in_memory() == before
        for _ in range(2):
            assert source.first().id.index == 0 and source.taken == 0  # type: ignore[union-attr]
        assert in_memory() == before


def test_broken_video_does_not_delay_the_others(tmp_path: Path) -> None:
    for name in ("a.mkv", "b.mkv", "c.mkv", "d.mkv"):
        make_video(tmp_path / name, 20, "mjpeg")
    source = open_source([str(tmp_path)])
    cut_in_half(tmp_path / "a.mkv")
    (tmp_path / "c.mkv").unlink()  # between then and now
    names = []
    with pytest.raises(InputMismatch, match="a.mkv ends after .*; .*c.mkv: No such file") as error:
        for item in source:
            names.append(item.id.name)  # type: ignore[union-attr]
    of_a = [name for name in names if name.startswith("a.mkv")]
    assert 0 < len(of_a) < 20
    assert names == of_a + [f"{file}.mkv#{index}" for file in "bd" for index in range(20)]
    assert [str(one) for one in source.broken] == str(error.value).split("; ")
    for name in ("a.mkv", "c.mkv"):
        make_video(tmp_path / name, frames=1)
    assert len(list(source)) == 42 and not source.broken, "each iteration starts again"


def test_several_files_and_videos_come_one_after_the_other(tmp_path: Path) -> None:
    for name in ("one.mp4", "two.mp4"):
        make_video(tmp_path / name, frames=2)
    (tmp_path / "image.png").write_bytes(as_png(picture(3)))
    words = [str(tmp_path / "*.png"), str(tmp_path / "*.mp4"), str(tmp_path / "one.mp4")]
    with open_source(words) as source:
        first = source.first()
        names = [item.id.name if isinstance(item, Frame) else item.name for item in source]
    assert names == ["image.png", "one.mp4#0", "one.mp4#1", "two.mp4#0", "two.mp4#1", "one.mp4#0", "one.mp4#1"]
    assert first.name == "image.png"  # type: ignore[union-attr]
    (tmp_path / "image.png").unlink()
    assert numbers(open_source([str(tmp_path)])) == [0, 1, 0, 1], "a folder of videos"


def test_a_folder_drops_nothing_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(as_png(picture(1)))
    (tmp_path / "a.png").write_bytes(b"not an image")
    with sources.folder(tmp_path) as source:
        assert [item.name for item in source] == ["a.png", "b.png"] and len(source) == 2  # type: ignore[union-attr,arg-type]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputMismatch, match="holds no input"):
        sources.folder(tmp_path / "empty")


def test_without_pyav_one_line_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_video(tmp_path / "a.mp4", frames=1)
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr("edge_client.sources.find_spec", lambda name: None)
    for make in (lambda: sources.video(path), lambda: sources.camera("rtsp://127.0.0.1:1/")):
        with pytest.raises(SpecError, match=r'pip install "isthmus\[video\]"'):
            make()


def test_a_frame_is_read_as_the_same_image_in_a_file(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    (tmp_path / "same.png").write_bytes(as_png(pixels))
    frame = Frame(sources.FrameId("clip.mp4", 0), pixels)
    spec = load_spec("digits")
    assert torch.equal(spec.preprocess(frame)[0][0], spec.preprocess(tmp_path / "same.png")[0][0])


def shape_of_file(path: Path) -> torch.Tensor:
    """A spec's own way to read."""
    return torch.tensor([len(path.read_bytes())]) if path.suffix == ".png" else torch.zeros(0)


def test_a_specs_own_code_gets_a_frame_as_a_file() -> None:
    table = {"id": "m", "factory": "torch.nn:Identity", "preprocess": f"{__name__}:shape_of_file"}
    spec = spec_from_table(Table(table, "test"), Path())
    (size,), _ = spec.preprocess(Frame(sources.FrameId("cam", 0), picture(1)))
    assert int(size) == len(as_png(picture(1)))
    silent = spec_from_table(Table({"id": "m", "factory": "torch.nn:Identity"}, "test"), Path())
    with pytest.raises(IsthmusError, match=r"cam#0: model m has no \[preprocess\] for images"):
        silent.preprocess(Frame(sources.FrameId("cam", 0), picture(1)))


def test_single_source_is_passed_through(tmp_path: Path) -> None:
    path = make_video(tmp_path / "A.MP4", frames=1)
    assert isinstance(open_source([str(path)]), Video)
    with pytest.raises(SpecError, match="for a camera"):
        open_source([str(path)], queue=3)
    with pytest.raises(SpecError, match="only input"):
        open_source([str(path), "rtsp://127.0.0.1/"])
