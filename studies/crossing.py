"""``python -m studies.crossing``: how little can cross if the model helps, and what it gives away.

    basis      the codec "basis" in each of its steps, where the others were measured; for these the best one counts
    digits     the shipped model, three cuts: learned codecs against those that need no training
    networks   a small ResNet and a small ViT, trained here; the same
    leakage    the meter on digits, with a small and a large decoder; do both put the cuts in the same order?
    prompts    a language model's prompts, from what its first blocks send (needs a folder with a GGUF model)

Learned codecs are trained on three of four of the images that digits was trained on, and distorted copies of them; the
others choose among encoders. Judged are the 360 images held out for the model, and four distorted copies of each, which
nothing here is trained on or chosen by: there every codec may lose half a point of accuracy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edge_client.calibrating.study import STEPS, Study
from edge_client.model_choice import ModelChoice
from edge_client.tasks.leakage import leakage
from edge_client.tasks.learn import Learned, learn
from edge_client.tasks.subject import subject_of
from edge_client.user_input import LoadedModel, NamedInput, labelled, load, named_inputs
from shared_hooks.codecs import RAW, register
from shared_hooks.crossing import EarlyOutput, books_of
from shared_hooks.models.digits.train import as_tensors, distort, load_images

LOSS = 0.005
OTHERS = ("raw", "int8", "int6", "int4", "int3", "int2", "int1", "basis", "sparse")
CUTS = ("stem.2", "stage1.1.relu#2", "stage2.1.relu#2")
LEAKAGE_CUTS = ("input", "stem.2", "stage1.1.relu#2", "stage2.1.relu#2", "stage3.0.relu#2", "stage3.1.relu#2", "pool")


TRAINED_ON = 1100
"""Images for training, of 1,437; the others choose."""


def unlabelled(count: int, *, choose: bool = False) -> list[torch.Tensor]:
    """Images, then distorted copies of them, (1, 1, 32, 32) each. ``choose``: of those that choose."""
    pixels, _ = as_tensors(load_images()[0])
    pixels = pixels[TRAINED_ON:] if choose else pixels[:TRAINED_ON]
    dice = torch.Generator().manual_seed(32 if choose else 30)
    found = [pixels]
    while sum(map(len, found)) < count:
        found.append(distort(pixels, dice))
    return list(torch.cat(found)[:count].split(1))


def unseen(copies: int) -> list[NamedInput]:
    """Held-out images and ``copies`` distorted ones of each, with their labels."""
    pixels, truths = as_tensors(load_images()[1])
    dice = torch.Generator().manual_seed(31)
    every = torch.cat([pixels, *(distort(pixels, dice) for _ in range(copies))])
    labels = truths.repeat(copies + 1).tolist()
    return labelled([(image, str(label)) for image, label in zip(every.split(1), labels, strict=True)], "input")


def judged(
    loaded: LoadedModel, found: Learned, items: Sequence[NamedInput], learnt: Sequence[NamedInput]
) -> dict[str, Any]:
    """The learned codec and the others at its cut: bytes, points of accuracy, and the best of the others."""
    name = register(f"learned:{found.file}")
    study = Study(
        loaded, [found.cut], [*OTHERS, name], LOSS, "classes", learnt=learnt, every_cut=True, every_codec=True
    )
    table = study.run(items)
    whole = table.whole_accuracy or 0.0
    rows = {}
    for one in table.cuts[0].codecs:
        points = 100 * (whole - (one.accuracy if one.accuracy is not None else whole))
        payload = found.payloads.get(one.codec)
        header = found_header(found, one.codec)
        rows[one.codec] = {
            "bytes_up": one.bytes_up,
            "payload": one.bytes_up - header if payload is not None or header else None,
            "points_lost": points,
            "changed": one.loss,
            "changed_at_most": one.high,
        }
    own = rows[name]
    within = {key: row for key, row in rows.items() if not key.startswith("learned:") and row["points_lost"] <= 0.5}
    best = min(within, key=lambda key: within[key]["bytes_up"])
    return {
        "cut": found.cut,
        "inputs": len(items),
        "whole_accuracy": whole,
        "codec": name,
        "rows": rows,
        "best_other": best,
        "times_fewer_with_header": within[best]["bytes_up"] / own["bytes_up"],
        "times_fewer_payload": (within[best]["bytes_up"] - found_header(found, best))
        / (own["bytes_up"] - found_header(found, name)),
        "seconds": found.seconds,
        "learnt_from": found.learnt_from,
        "encode_ms": found.encode_ms,
        "decode_ms": found.decode_ms,
    }


def found_header(found: Learned, codec: str) -> float:
    """Bytes of a header with this codec, as the training's own table has them; of others that of int4."""
    known = {one.codec: one.bytes_up - found.payloads[one.codec] for one in found.losses}
    return known.get(codec, known["int4"])


def _learned(model: Any, cut: str, inputs: int, seconds: float | None = None) -> Learned:
    folder = tempfile.mkdtemp(prefix="isthmus-crossing-")
    return learn(
        model,
        unlabelled(inputs),
        cut,
        choose_by=unlabelled(1000, choose=True),
        max_loss=LOSS,
        output=folder,
        progress=False,
        seconds=seconds,
        say=print,
    )


def _show(one: dict[str, Any]) -> None:
    own, best = one["rows"][one["codec"]], one["rows"][one["best_other"]]
    print(
        f"{one['cut']:18} learned {own['bytes_up']:.0f} B ({own['points_lost']:+.2f} points, "
        f"{100 * own['changed']:.2f} % changed), {one['best_other']} {best['bytes_up']:.0f} B "
        f"({best['points_lost']:+.2f}): {one['times_fewer_with_header']:.2f}x fewer, without headers "
        f"{one['times_fewer_payload']:.1f}x; {one['seconds']:.0f} s for {one['learnt_from']} inputs",
        flush=True,
    )


def digits(options: argparse.Namespace) -> dict[str, Any]:
    """Three cuts."""
    choice = ModelChoice("digits", threads=options.threads)
    items, found = unseen(options.copies), []
    loaded = load(choice)
    with loaded.wrapped:
        learnt = named_inputs(unlabelled(200))
        for cut in options.cuts:
            found.append(judged(loaded, _learned(choice, cut, options.inputs), items, learnt))
            _show(found[-1])
    return {"cuts": found, "inputs": options.inputs}


# -- networks that are trained here --------------------------------------------------------------------------------


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride) if stride > 1 or before != after else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.relu(
            self.norm2(self.second(torch.relu(self.norm1(self.first(x))))) + self.shortcut(x)
        )
        return found


class SmallResNet(nn.Module):
    """Three residual blocks for (N, 1, 32, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Residual(1, 12, 2), _Residual(12, 24, 2), _Residual(24, 48, 2))
        self.last = nn.Linear(48, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.blocks(image).mean((2, 3)))
        return found


class SmallViT(nn.Module):
    """Four encoder layers over 64 patches of (N, 1, 32, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 48, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 64, 48) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.last = nn.Linear(48, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(image).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            tokens = layer(tokens)
        found: torch.Tensor = self.last(tokens.mean(1))
        return found


NETWORKS = {"SmallResNet": (SmallResNet, ("blocks.1",)), "SmallViT": (SmallViT, ("layers.1",))}


def taught(make: type[nn.Module], epochs: int) -> nn.Module:
    """Trained on the training images, distorted again in every epoch."""
    torch.manual_seed(3)
    net = make()
    pixels, truths = as_tensors(load_images()[0])
    dice = torch.Generator().manual_seed(4)
    teacher = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=0.01)
    steps = epochs * -(-len(pixels) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(teacher, 3e-3, total_steps=steps)
    net.train()
    for _ in range(epochs):
        shown = distort(pixels, dice)
        for some in torch.randperm(len(pixels), generator=dice).split(64):
            loss = functional.cross_entropy(net(shown[some]), truths[some], label_smoothing=0.05)
            teacher.zero_grad()
            loss.backward()
            teacher.step()
            schedule.step()
    return net.eval()


def networks(options: argparse.Namespace) -> dict[str, Any]:
    """A cut in the middle of each."""
    items, learnt, found = unseen(options.copies), named_inputs(unlabelled(200)), {}
    for name, (make, cuts) in NETWORKS.items():
        net = taught(make, options.epochs)
        rows = []
        for cut in cuts:
            own = _learned(net, cut, options.inputs)
            loaded = subject_of(net, items[:1]).load()
            with loaded.wrapped:
                rows.append(judged(loaded, own, items, learnt))
            _show(rows[-1])
        found[name] = rows
    return found


# -- what is given away ----------------------------------------------------------------------------------------------


def ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=lambda at: values[at])
    return [order.index(at) for at in range(len(values))]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The rank correlation of values without ties."""
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(ranks(a), ranks(b), strict=True)) / (n * (n * n - 1))


def meter(options: argparse.Namespace) -> dict[str, Any]:
    """Small decoder, three seeds; large decoder, one."""
    choice, inputs = ModelChoice("digits", threads=options.threads), unlabelled(options.inputs)
    cuts = ",".join(LEAKAGE_CUTS)
    small = leakage(choice, inputs, splits=cuts, seeds=3, progress=False)
    print(small.text(), flush=True)
    large = leakage(choice, inputs, splits=cuts, seeds=1, decoder="large", steps=options.steps, progress=False)
    print(large.text(), flush=True)
    ssim = [[one.scores["ssim"].mean for one in found.table.cuts] for found in (small, large)]
    order = spearman(*ssim)
    print(f"Spearman of the cuts' order, small against large: {order:.3f}")
    return {"small": small.as_dict(), "large": large.as_dict(), "spearman": order, "noise": noise_control(options)}


def noise_control(options: argparse.Namespace) -> dict[str, float]:
    """Inverting noise, against the average."""
    import numpy as np

    from edge_client.learning.examples import examples_of
    from edge_client.learning.inversion import (
        Split,
        crossing_features,
        invert,
        noise_features,
        picture_scores,
        target_of,
    )

    loaded = load(ModelChoice("digits", threads=options.threads))
    with loaded.wrapped:
        examples = examples_of(loaded, "stage1.1.relu#2", named_inputs(unlabelled(options.inputs)))
        _, target = target_of(examples)
        dice = np.random.default_rng(0)
        parts, span = Split.of(len(examples), 0, 200), float(target.max() - target.min())
        features = noise_features(crossing_features(examples, RAW, dice), dice)
        made = invert(features, target, parts.learn, seed=0).given_back(parts.attacked)
        mean = target[parts.learn].mean(0, keepdim=True).expand_as(made)
        found = {
            "noise": picture_scores(made, target[parts.attacked], span)["ssim"],
            "average": picture_scores(mean, target[parts.attacked], span)["ssim"],
        }
    print(f"inverting noise: SSIM {found['noise']:.4f}; the average's: {found['average']:.4f}")
    return found


def prompts(options: argparse.Namespace) -> dict[str, Any]:
    """Cuts 0, 1 and the middle of a language model, raw and int4."""
    import transformers

    folder, file = options.gguf.parent, options.gguf.name
    words = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    inputs = list(_passages(words, options.passages))
    blocks = model.config.num_hidden_layers
    cuts = ["model.embed_tokens", *(f"model.layers.{number}" for number in (0, 1, blocks // 2, blocks - 1))]

    class Whole(nn.Module):
        """Logits alone, of token ids alone."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
            return found

    names = ",".join(["input", *(f"model.{cut}" for cut in cuts)])
    found = leakage(Whole().eval(), inputs, splits=names, codecs="raw,int4", seeds=3, progress=False)
    print(found.text(), flush=True)
    return {**found.as_dict(), "blocks": blocks, "passages": len(inputs)}


def _passages(words: Any, count: int) -> Iterator[torch.Tensor]:
    """Passages of the project's own pages, 48 tokens each."""
    root = Path(__file__).parents[1]
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted([*root.glob("docs/*.md"), *root.glob("*.md")]))
    ids = torch.tensor(words(text)["input_ids"])
    rows = ids[: len(ids) // 48 * 48].reshape(-1, 48)
    yield from rows[:: max(1, len(rows) // count)][:count].split(1)


def by_step(loaded: LoadedModel, cut: str, items: Sequence[NamedInput], learnt: Sequence[NamedInput]) -> dict[str, Any]:
    """Accuracy and bytes of the codec "basis" with its steps, learnt from ``learnt``: a study keeps the coarsest one
    that is *shown* to lose no more than is allowed, and others may lose no more as well.
    """
    wrapped = loaded.wrapped
    heads = [wrapped.head(cut, *item.read(loaded.spec)[0]) for item in learnt]
    books = {step: books_of(heads, step) for step in STEPS}
    whole, right = 0, dict.fromkeys(STEPS, 0)
    sizes, headers = dict.fromkeys(STEPS, 0), dict.fromkeys(STEPS, 0)
    for item in items:
        early = wrapped.head(cut, *item.read(loaded.spec)[0])
        whole += str(int(wrapped.tail(early).argmax())) == item.truth
        for step, own in books.items():
            crossing = early.crossing.with_books(own)
            parcel = replace(early, crossing=crossing).pack("basis")
            sizes[step], headers[step] = sizes[step] + parcel.nbytes, headers[step] + len(parcel.header)
            payload = bytearray().join(parcel.buffers)
            came = EarlyOutput.unpack(crossing, parcel.header, payload, disposable=True)
            right[step] += str(int(wrapped.tail(came).argmax())) == item.truth
    count = len(items)
    return {
        f"{step:g}": {
            "payload": sizes[step] / count,
            "bytes_up": (sizes[step] + headers[step]) / count,
            "points_lost": 100 * (whole - right[step]) / count,
        }
        for step in STEPS
    }


def basis(options: argparse.Namespace) -> dict[str, Any]:
    """Each cut of the other runs."""
    items, learnt, found = unseen(options.copies), named_inputs(unlabelled(400)), {}
    loaded = load(ModelChoice("digits", threads=options.threads))
    with loaded.wrapped:
        for cut in options.cuts:
            found[cut] = by_step(loaded, cut, items, learnt)
            print(cut, found[cut], flush=True)
    for name, (make, (block,)) in NETWORKS.items():
        loaded = subject_of(taught(make, options.epochs), items[:1]).load()
        with loaded.wrapped:
            found[name] = by_step(loaded, block, items, learnt)
        print(name, found[name], flush=True)
    return found


RUNS = {"basis": basis, "digits": digits, "networks": networks, "leakage": meter, "prompts": prompts}


def main() -> int:
    """The exit status is 0, whatever is measured."""
    parser = argparse.ArgumentParser(prog="python -m studies.crossing", description=__doc__)
    parser.add_argument("what", choices=RUNS)
    parser.add_argument("--inputs", type=int, default=4000, help="to learn from (default: 4000)")
    parser.add_argument("--cuts", nargs="+", default=CUTS, help="of digits")
    parser.add_argument("--copies", type=int, default=4, help="distorted copies of each image that is judged by")
    parser.add_argument("--epochs", type=int, default=24, help="for networks that are trained here")
    parser.add_argument("--steps", type=int, default=400, help="of a large decoder's training")
    parser.add_argument("--passages", type=int, default=240)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="of prompts: the model's file")
    parser.add_argument("--json", type=Path, help="where the result goes; others in it stay")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    found = RUNS[options.what](options)
    found = {"torch": torch.__version__, "seconds": round(time.monotonic() - began), **found}
    if options.json is not None:
        known = json.loads(options.json.read_text()) if options.json.is_file() else {}
        options.json.write_text(json.dumps({**known, options.what: found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
