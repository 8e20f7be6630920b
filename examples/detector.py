"""A detector, split: the edge finds where digits are, the cloud reads them, and the boxes are drawn.

It is a tiny one, with nothing to train: places with the most ink, each cut out and read by the shipped model.
Where it looks depends on the data, which needs nothing from you.

cloud-server --model examples/detector.toml &
python examples/detector.py --server 127.0.0.1:50051 --output boxes.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional

from edge_client import EdgeClient
from shared_hooks.models import load_spec

HERE = Path(__file__).parent
IMAGES = HERE.parent / "shared_hooks" / "models" / "digits" / "images"
SIDE = 32


class Finder(nn.Module):
    """Boxes of the places with the most ink: pictures (1, 1, H, W) -> boxes (found, 4): left, top, right, bottom."""

    def __init__(self, found: int) -> None:
        super().__init__()
        self.found = found
        self.ink = nn.Conv2d(1, 1, SIDE, bias=False)
        tent = 1 - torch.linspace(-1, 1, SIDE).abs()  # ink counts a little more in the middle: boxes are centred
        self.ink.weight.data[:] = 1 + 0.1 * torch.outer(tent, tent)
        self.highest = nn.MaxPool2d(2 * SIDE - 1, stride=1, padding=SIDE - 1)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        ink = self.ink(picture)
        peaks = torch.where(ink == self.highest(ink), ink, -torch.inf)
        at = peaks.flatten().topk(self.found).indices
        top, left = at // ink.shape[3], at % ink.shape[3]
        return torch.stack([left, top, left + SIDE, top + SIDE], dim=1)


class Detector(nn.Module):
    """Boxes (found, 4) in pixels, and scores (found, 10) of what is in them."""

    def __init__(self, found: int = 4) -> None:
        super().__init__()
        self.finder = Finder(found)
        self.reader = load_spec("digits").load_model()

    def forward(self, picture: torch.Tensor) -> dict[str, torch.Tensor]:
        boxes = self.finder(picture)
        side = torch.arange(SIDE)
        rows, columns = boxes[:, 1, None, None] + side[:, None], boxes[:, 0, None, None] + side
        cut_out = picture[0, 0][rows, columns][:, None]
        return {"boxes": boxes, "scores": functional.softmax(self.reader(cut_out), dim=1)}


def build() -> Detector:
    """What detector.toml names."""
    return Detector()


def scene() -> Image.Image:
    """A picture with four digits."""
    picture = Image.new("L", (96, 96))
    names = ("1728_label7", "0796_label0", "1031_label2", "1540_label9")
    for name, place in zip(names, [(2, 5), (60, 0), (8, 58), (61, 62)], strict=True):
        picture.paste(Image.open(IMAGES / f"{name}.png"), place)
    return picture


def drawn(picture: Image.Image, output: dict[str, torch.Tensor], zoom: int = 4) -> Image.Image:
    """The picture with each box, what is in it, and how sure that is."""
    canvas = picture.convert("RGB").resize((zoom * picture.width, zoom * picture.height))
    pen = ImageDraw.Draw(canvas)
    for box, scores in zip(output["boxes"].tolist(), output["scores"], strict=True):
        pen.rectangle([zoom * edge for edge in box], outline="lime", width=2)
        pen.text((zoom * box[0] + 4, zoom * box[1] + 2), f"{int(scores.argmax())}  {scores.max():.0%}", fill="lime")
    return canvas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--split", default="finder.highest")
    parser.add_argument("--output", default="boxes.png", metavar="FILE")
    options = parser.parse_args()
    picture = scene()
    with EdgeClient(options.server, str(HERE / "detector.toml"), split=options.split) as client:
        answer = client.infer(picture)
    for box, scores in zip(answer.output["boxes"].tolist(), answer.output["scores"], strict=True):
        print(f"a {int(scores.argmax())} at {box}, {scores.max():.0%} sure")
    drawn(picture, answer.output).save(options.output)
    print(f"{options.output}: cut at {answer.split}, {answer.bytes_up} bytes up, {answer.bytes_down} down")


if __name__ == "__main__":
    main()
