"""Cuts along branches, measured: are sampled sets of larger models exact, and what does the best set win?

    python -m studies.branches sets [--sets N] [--seed N] [--json FILE]
    python -m studies.branches gain [--rate MBIT] [--json FILE]          # as root: namespaces and a shaped cable

``sets``: models of transformers from small configurations, and those of the tests' zoo; sets of up to three calls are
drawn. Each head's bytes are resumed by another copy of the model, and the answer is compared with the whole model's.

``gain``: three models whose branches differ in what goes in and what comes out, on the experiments' testbed, with an
edge of a quarter of a core: what is predicted of the best set and of the best single cut, and what is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edge_client import ConnectionOptions, EdgeClient, ModelChoice
from edge_client.tasks.plan import plan
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import IsthmusError
from shared_hooks.tensors import tensors_in

Made = tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]


def _library() -> dict[str, Made]:
    """Architectures with branches, from configurations of their own."""
    import transformers as t

    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = torch.arange(8)[None] % 50
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    vision = {**text, "image_size": 32, "patch_size": 8}
    both = {"text_config": {**text, "vocab_size": 60}, "vision_config": vision}
    seq = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    seq |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 60}
    two = {"input_ids": ids, "pixel_values": pixels}
    there = {"input_ids": ids, "decoder_input_ids": ids[:, :5], "use_cache": False}
    seen = {"input_ids": torch.cat([torch.full((1, 16), 59), ids], 1), "pixel_values": pixels, "use_cache": False}
    sound = torch.randn(1, 80, 60, generator=torch.Generator().manual_seed(2))
    return {
        "CLIP": (lambda: t.CLIPModel(t.CLIPConfig(**both, projection_dim=16)), (), two),
        "SigLIP": (lambda: t.SiglipModel(t.SiglipConfig(**both)), (), two),
        "ChineseCLIP": (lambda: t.ChineseCLIPModel(t.ChineseCLIPConfig(**both, projection_dim=16)), (), two),
        "LLaVA": (
            lambda: t.LlavaForConditionalGeneration(
                t.LlavaConfig(
                    vision_config=t.CLIPVisionConfig(**vision),
                    text_config=t.LlamaConfig(**text, num_key_value_heads=4, vocab_size=60),
                    image_token_id=59,
                )
            ),
            (),
            seen,
        ),
        "T5": (
            lambda: t.T5ForConditionalGeneration(
                t.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=60)
            ),
            (),
            there,
        ),
        "BART": (lambda: t.BartForConditionalGeneration(t.BartConfig(**seq, pad_token_id=1)), (), there),
        "Marian": (lambda: t.MarianMTModel(t.MarianConfig(**seq, pad_token_id=1)), (), there),
        "Whisper": (
            lambda: t.WhisperForConditionalGeneration(
                t.WhisperConfig(**seq, max_source_positions=30, pad_token_id=1, decoder_start_token_id=2)
            ),
            (),
            {"input_features": sound, "decoder_input_ids": ids[:, :5], "use_cache": False},
        ),
        "BERT": (lambda: t.BertModel(t.BertConfig(**text, vocab_size=60)), (), {"input_ids": ids}),
        "ConvNeXt": (
            lambda: t.ConvNextModel(t.ConvNextConfig(depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 24, 32])),
            (pixels,),
            {},
        ),
        "SegFormer": (
            lambda: t.SegformerForSemanticSegmentation(
                t.SegformerConfig(depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 3, 4])
            ),
            (pixels,),
            {},
        ),
    }


def _sets(name: str, made: Made, count: int, dice: random.Random) -> dict[str, Any]:
    make, args, kwargs = made

    def built() -> nn.Module:
        torch.manual_seed(0)
        return make().eval()

    with torch.no_grad():
        expected = list(tensors_in(built()(*args, **kwargs)))
    edge, cloud = WrappedModel(built(), metrics=False), WrappedModel(built(), metrics=False)
    edge.plan(*args, **kwargs)
    names = [layer.name for layer in edge.cuts]
    found: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for _ in range(count):
        cut = dice.sample(names, min(len(names), dice.randint(1, 3)))
        try:
            early = edge.head(cut, *args, **kwargs)
            output = cloud.tail(EarlyOutput.from_bytes(early.to_bytes()))
        except IsthmusError as error:
            found["refused"] += 1
            reasons[str(error).partition(": ")[2][:120]] += 1
            continue
        same = all(map(torch.equal, tensors_in(output), expected))
        found["exact" if same else "wrong"] += 1
        found["along branches"] += bool(early.crossing.later)
        if not same:
            print(f"WRONG: {name}, {cut}", file=sys.stderr)
    return {"calls": len(names), **found, "reasons": dict(reasons.most_common(3))}


def sets(options: argparse.Namespace) -> dict[str, Any]:
    """Every model, so many sets each."""
    from tests.zoo import branching

    zoo = {name: (make, args, {}) for name, (make, args) in branching.MODELS.items()}
    dice = random.Random(options.seed)
    found = {}
    for name, made in {**_library(), **zoo}.items():
        try:
            found[name] = _sets(name, made, options.sets, dice)
        except Exception as error:  # a release of transformers that builds it otherwise
            found[name] = {"not built": f"{type(error).__name__}: {error}"[:200]}
        print(name, found[name], flush=True)
    total = {
        key: sum(one.get(key, 0) for one in found.values()) for key in ("exact", "along branches", "refused", "wrong")
    }
    print("all", total)
    return {"models": found, "all": total}


# What a set wins.


def _tower(width: int, depth: int, size: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number in range(depth):
        layers += [nn.Linear(size if not number else width, width), nn.ReLU()]
    return nn.Sequential(*layers)


class Ranker(nn.Module):
    """A heavy tower of a few numbers, first; then a light one of a picture, which comes down to little."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.profile = _tower(2048, 6, 64)
        self.picture = nn.Sequential(
            nn.Conv2d(3, 8, 7, 4, 3),
            nn.ReLU(),
            nn.Conv2d(8, 8, 5, 4, 2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(2048 + 128, 10)

    def forward(self, profile: Tensor, picture: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.profile(profile), self.picture(picture)], 1))
        return out


class TwoCameras(nn.Module):
    """A small picture that much is done with, first; then a large one that little is done with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU())
        self.work = nn.Sequential(*[nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(12)])
        self.far = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(64 + 8, 10)

    def forward(self, near: Tensor, far: Tensor) -> Tensor:
        worked = self.work(self.near(near)).mean((2, 3))
        out: Tensor = self.head(torch.cat([worked, self.far(far)], 1))
        return out


class Detector(nn.Module):
    """A heavy head over features, before a light one that says where to look in the large picture."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small = nn.Sequential(nn.Conv2d(3, 16, 16, 16), nn.ReLU())
        self.classes = nn.Sequential(nn.Flatten(), _tower(1536, 5, 16 * 14 * 14))
        self.edges = nn.Sequential(nn.Conv2d(3, 4, 5, 4, 2), nn.ReLU(), nn.MaxPool2d(8))
        self.boxes = nn.Linear(4 * 7 * 7, 8)

    def forward(self, picture: Tensor) -> tuple[Tensor, Tensor]:
        return self.classes(self.small(picture)), self.boxes(self.edges(picture).flatten(1))


GAIN: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "ranker": (Ranker, ((1, 64), (1, 3, 256, 256))),
    "two-cameras": (TwoCameras, ((1, 3, 32, 32), (1, 3, 256, 256))),
    "detector": (Detector, ((1, 3, 224, 224),)),
}


def gain(options: argparse.Namespace) -> dict[str, Any]:
    """Each model on the testbed: predictions, then requests in turn."""
    from studies.experiments.testbed import SERVER, Testbed

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        specs = {}
        for name, (make, shapes) in GAIN.items():
            specs[name] = Path(folder) / f"{name}.toml"
            args = ", ".join(f"{{shape = {list(shape)}}}" for shape in shapes)
            text = f'id = "{name}"\nfactory = "studies.branches:{make.__name__}"\n[example]\nargs = [{args}]\n'
            specs[name].write_text(text, encoding="utf-8")
        with Testbed([str(one) for one in specs.values()], rtt_ms=options.rtt, share=options.share) as bed:
            bed.network.rate(options.rate)
            for name, spec in specs.items():
                words = ["measure", "--server", SERVER, "--model", str(spec), "--name", name]
                words += ["--requests", str(options.requests), "--seconds", str(options.seconds)]
                with bed.edge("studies.branches", *words) as process:
                    bed.slow(process)
                    assert process.stdout is not None
                    lines = process.stdout.read().splitlines()
                found[name] = json.loads(lines[-1])
                print(name, lines[-1], flush=True)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One model, from the edge."""
    choice = ModelChoice(options.model, device="cpu", threads=1)
    found = _measured(options.server, choice, GAIN[options.name][1], options)
    print(json.dumps(found), flush=True)
    return found


def _measured(
    server: str, choice: ModelChoice, shapes: tuple[tuple[int, ...], ...], options: argparse.Namespace
) -> dict[str, Any]:
    planned = plan(server, choice, seconds=options.seconds, progress=False)
    best, single = planned.branches, planned.decision.best_cut
    assert best is not None and single is not None
    inputs = [torch.randn(*shape, generator=torch.Generator().manual_seed(3)) for shape in shapes]
    took: dict[str, list[float]] = {"set": [], "single": []}
    cuts: dict[str, Any] = {"set": list(best.names), "single": single.name}
    connection = ConnectionOptions(patience=60)
    with EdgeClient(server, choice, "input", metrics=False, connection=connection) as client:
        for cut in cuts.values():
            client.infer(*inputs, split=cut)
        answers = {}
        for _ in range(options.requests):
            for name, cut in cuts.items():
                began = time.perf_counter()
                answers[name] = client.infer(*inputs, split=cut)
                took[name].append(time.perf_counter() - began)
        same = torch.equal(*(next(iter(tensors_in(answers[name].output))) for name in ("set", "single")))
    measured = {name: statistics.median(times) * 1e3 for name, times in took.items()}
    predicted = {"set": best.latency_ns / 1e6, "single": single.latency_ns / 1e6}
    return {
        "set": cuts["set"],
        "single": cuts["single"],
        "bytes": {"set": answers["set"].bytes_up, "single": answers["single"].bytes_up},
        "predicted_ms": predicted,
        "measured_ms": measured,
        "gain_predicted": predicted["single"] / predicted["set"],
        "gain_measured": measured["single"] / measured["set"],
        "off": measured["set"] / predicted["set"] - 1,
        "same_answer": same,
        "cheaper_than_any_single": planned.decision.winner.name,
    }


def main(argv: list[str] | None = None) -> int:
    """Prints, and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m studies.branches", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("sets")
    one.add_argument("--sets", type=int, default=150)
    one.add_argument("--seed", type=int, default=0)
    two = commands.add_parser("gain")
    two.add_argument("--rate", type=float, default=8.0, help="Mbit/s")
    two.add_argument("--rtt", type=float, default=10.0, help="ms")
    two.add_argument("--share", type=float, default=0.25, help="of a core, for the edge")
    three = commands.add_parser("measure", help="one model from the edge, for gain")
    for name in ("--server", "--model", "--name"):
        three.add_argument(name, required=True)
    for command in (two, three):
        command.add_argument("--seconds", type=float, default=10.0)
        command.add_argument("--requests", type=int, default=30)
    for command in (one, two, three):
        command.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    found = {"sets": sets, "gain": gain, "measure": measure}[options.command](options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if found.get("all", {}).get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
