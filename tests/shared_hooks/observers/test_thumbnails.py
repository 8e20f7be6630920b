"""Small heat maps: what they show, that nothing else passes for one, and that they give way first."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edge_client import EdgeClient
from edge_client.__main__ import main
from edge_client.commands.run_files import HeatMaps, file_name
from shared_hooks.errors import BadFrame, SpecError
from shared_hooks.observers import AttentionCapture, named
from shared_hooks.observers.thumbnails import MAX_TEXT, SIDE, decoded, encoded, is_thumbnail, shrunk
from tests.shared_hooks.observers.small import reader
from tests.shared_hooks.observers.test_hooks import server

READER = "m=tests.shared_hooks.observers.small:reader"
CUT = "transformer.h.0.ln_2"  # after the first attention, before the second


@pytest.mark.parametrize("form", [(5, 7), (64, 64), (100, 1), (257, 300), (1, 1)])
def test_a_thumbnail_is_the_mean_over_heads_of_the_first_item(form: tuple[int, int]) -> None:
    weights = torch.rand(2, 3, *form, generator=torch.Generator().manual_seed(1))
    small = shrunk(weights)
    assert small.shape == (min(SIDE, form[0]), min(SIDE, form[1]))
    if max(form) <= SIDE:
        torch.testing.assert_close(small, weights[0].mean(0))
    text = encoded(small.numpy())
    assert is_thumbnail(text) and len(text) <= MAX_TEXT
    shares = decoded(text)
    assert shares.shape == small.shape and shares.max() == 1
    assert np.abs(shares - (small / small.max()).numpy()).max() <= 1 / 255


def test_numbers_that_are_none_are_black() -> None:
    shares = decoded(encoded(np.array([[np.nan, 1.0], [np.inf, 0.25]])))
    assert shares.tolist() == [[0, 1], [0, (128 / 255) ** 2]]
    assert decoded(encoded(np.zeros((2, 2)))).tolist() == [[0, 0], [0, 0]]


def png(image: Image.Image, **more: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG", **more)
    return data.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def made(width: int = 4, height: int = 4, form: tuple[int, ...] = (8, 0, 0, 0, 0), body: bytes = b"") -> bytes:
    header = struct.pack(">II5B", width, height, *form)
    rows = body or zlib.compress(b"\0" * 20)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


GOOD = made()
HOSTILE = {
    "no PNG": b"GIF89a",
    "nothing": b"",
    "too wide": made(width=SIDE + 1),
    "a bomb's header": made(1 << 31 - 1, 1 << 31 - 1),
    "of no size": made(width=0),
    "coloured": png(Image.new("RGB", (4, 4))),
    "with a palette": png(Image.new("P", (4, 4))),
    "sixteen bits": made(form=(16, 0, 0, 0, 0)),
    "interlaced": made(form=(8, 0, 0, 0, 1)),
    "cut off": GOOD[:-5],
    "without an end": GOOD[:-12],
    "without pixels": GOOD[:33] + GOOD[-12:],
    "with more behind": GOOD + b"<script>",
    "with a chunk of text": GOOD[:33] + chunk(b"tEXt", b"a\0b") + GOOD[33:],
    "a wrong checksum": GOOD[:40] + bytes([GOOD[40] ^ 1]) + GOOD[41:],
    "a length beyond its end": GOOD[:33] + b"\xff\xff\xff\xff" + GOOD[37:],
    "two headers": GOOD[:33] + GOOD[8:],
    "too long": made(body=bytes(MAX_TEXT)),
}


def observations(picture: Any) -> bytes:
    record = {"name": "a", "step": 0, "picture": picture}
    one = {"records": [record], "notes": [], "left_out": 0, "failures": 0, "last_failure": "", "cost_ns": 1}
    return json.dumps({"attention": one}).encode()


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_only_a_small_greyscale_png_passes(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert is_thumbnail(base64.b64encode(GOOD).decode()) and not is_thumbnail(text)
    with pytest.raises(BadFrame, match="heat map"):
        decoded(text)
    if text:
        with pytest.raises(BadFrame, match="malformed observations: a picture"):
            named.from_bytes(observations(text))


@pytest.mark.parametrize("text", [3, None, [], '"><script>', "data:image/png;base64,AAAA", "AAA", "é", "A\n=="])
def test_only_base64_passes(text: Any) -> None:
    assert not is_thumbnail(text)
    with pytest.raises(BadFrame, match="malformed observations: a picture"):
        named.from_bytes(observations(text))


@given(st.binary(max_size=60), st.integers(0, len(GOOD)))
def test_damaged_bytes_raise_nothing(noise: bytes, at: int) -> None:
    text = base64.b64encode(GOOD[:at] + noise + GOOD[at + len(noise) :]).decode()
    if is_thumbnail(text):
        assert noise == GOOD[at : at + len(noise)] or not noise


def test_nothing_is_decompressed_before_it_is_looked_at() -> None:
    text = base64.b64encode(made(body=b"not deflated at all")).decode()
    assert named.from_bytes(observations(text))["attention"]["records"][0]["picture"] == text
    with pytest.raises(BadFrame, match="damaged"):
        decoded(text)


@pytest.mark.parametrize("room", [8, 2, 0])
def test_pictures_are_left_out_first_and_counted(room: int) -> None:
    """There is room for so many of eight pictures."""
    picture = base64.b64encode(GOOD).decode()
    records = [{"name": f"layer{number}", "step": 0, "picture": picture} for number in range(8)]
    one = {"records": records, "notes": [], "left_out": 0, "failures": 0, "last_failure": "", "cost_ns": 1}
    found: named.Observations = {"activation": {**one, "records": []}, "attention": one}
    whole = len(json.dumps(found))
    most = whole if room == 8 else whole - (8 - room) * len(picture) + 30
    data = named.to_bytes(found, most)
    assert len(data) <= most
    again = named.from_bytes(data)["attention"]
    assert [bool(record["picture"]) for record in again["records"]] == [True] * room + [False] * (8 - room)
    assert again["left_out"] == 0 and again.get("pictures_left_out", 0) == 8 - room
    assert all(record["picture"] for record in records)
    # and when that is not enough, records
    less = named.from_bytes(named.to_bytes(found, 500))["attention"]
    assert less["left_out"] > 0 and not any(record["picture"] for record in less["records"])


def test_both_sides_send_pictures_of_their_attention() -> None:
    ids = torch.arange(12).reshape(2, 6)
    model = reader()
    with torch.no_grad(), AttentionCapture().attach(model) as attention:
        model(ids)
    with server(READER, "attention") as address, EdgeClient(address, READER, CUT, observers=["attention"]) as client:
        observed = client.infer(ids).observations
    for side, expected in zip(("edge", "cloud"), attention.records, strict=True):
        (record,) = observed[side]["attention"]["records"]
        assert record["name"] == expected.name and record["weights"] is None
        grid = expected.weights[0].mean(0)
        shares = decoded(record["picture"])
        assert np.abs(shares - (grid / grid.max()).numpy()).max() <= 1 / 255 + 1e-6


def test_run_writes_heat_maps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs, maps = tmp_path / "in", tmp_path / "maps"
    inputs.mkdir()
    for number in range(2):
        np.save(inputs / f"text {number}.npy", np.arange(6).reshape(1, 6) + number)
    with server(READER, "attention", "debug") as address:
        common = ["run", "--server", address, "--model", READER, "--split", CUT, "--input", str(inputs)]
        assert main([*common, "--observe", "attention", "--heat-maps", str(maps)]) == 0
        assert f"heat maps: 4 in {maps}" in capsys.readouterr().out
        found = sorted(str(path.relative_to(maps)) for path in maps.rglob("*.png"))
        assert found == [
            f"{folder}/{name}"
            for folder in ("0001_text_0.npy", "0002_text_1.npy")
            for name in ("cloud_000_transformer.h.1.attn.png", "edge_000_transformer.h.0.attn.png")
        ]
        with Image.open(maps / found[0]) as image:
            assert image.format == "PNG" and image.size[0] % 6 == 0 and image.size[0] >= 200
        assert main([*common, "--observe", "debug", "--heat-maps", str(maps)]) == 2
        assert "--heat-maps needs --observe attention" in capsys.readouterr().err
        (tmp_path / "file").touch()
        assert main([*common, "--observe", "attention", "--heat-maps", str(tmp_path / "file")]) == 2
        assert "--heat-maps: " in capsys.readouterr().err


HOSTILE_NAMES = ["../../etc/passwd", "..", "/abs", "a/b\\c:d", "\x1b[2J", "con\0", "x" * 500, "", "。", "-rf"]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_of_files_are_safe(name: str, tmp_path: Path) -> None:
    safe = file_name(name)
    assert safe not in ("", ".", "..") and len(safe) <= 80 and not set(safe) & set("/\\:\0\x1b ")
    maps = HeatMaps(str(tmp_path / "maps"))
    record = {"name": name, "step": 0, "picture": encoded(np.ones((2, 2)))}
    maps.write(1, name, {"cloud": {"attention": {"records": [record, record, {**record, "picture": ""}]}}})
    assert maps.written == 2
    assert len([*(tmp_path / "maps").glob("*/*.png")]) == 2 and [*tmp_path.iterdir()] == [tmp_path / "maps"]


def test_a_damaged_picture_and_a_full_disk_are_reported(tmp_path: Path) -> None:
    maps = HeatMaps(str(tmp_path / "maps"))
    bad = base64.b64encode(made(body=b"no")).decode()
    good = encoded(np.ones((2, 2)))
    records = [{"name": "a", "step": 0, "picture": one} for one in (bad, good)]
    maps.write(1, "x", {"edge": {"attention": {"records": records}}})
    assert "1 in " in maps.summary() and "1 that came were damaged" in maps.summary()
    (tmp_path / "maps" / "0002_x").touch()  # in the way of the folder
    maps.write(2, "x", {"edge": {"attention": {"records": records}}})
    with pytest.raises(SpecError, match="cannot be written"):
        maps.summary()
