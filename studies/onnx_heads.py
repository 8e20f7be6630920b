"""``python -m studies.onnx_heads``: of how many models, and at how many cuts, a head becomes a right ONNX file.

    python -m studies.onnx_heads --json docs/results/onnx_heads.json                       # the zoo of the tests
    python -m studies.onnx_heads --family transformers --models 40 --json ...
    python -m studies.onnx_heads --family timm --family detection --models 40 --json ...   # where they are installed
    python -m studies.onnx_heads --shipped --json ...       # the shipped model, every cut, through a server, by codec

Of each model some cuts are exported (`--cuts`); a head runs in onnxruntime, its tail in torch, and the answer is
compared with the whole model's on two inputs. Every model runs in a process of its own, with a bound of time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SECONDS = 240.0
Made = tuple[Any, Any]
"""A model and its call, (args, kwargs)."""


def of_zoo() -> dict[str, Callable[[], Made]]:
    """By name."""
    from tests.zoo import CASES

    return {one.name: (lambda one=one: (one.build(), one.inputs())) for one in CASES}  # type: ignore[misc]


def of_family(family: str, models: int, seed: int) -> dict[str, Callable[[], Made]]:
    """A sample of a family of `studies.library`, in the small."""
    from studies.library.__main__ import chosen

    def made(subject: Any) -> Made:
        prepared = subject.prepare()
        return prepared.build(), prepared.inputs(0)

    return {one.key: (lambda one=one: made(one)) for one in chosen([family], "", models, seed)}  # type: ignore[misc]


def judge(make: Callable[[], Made], cuts: int, seed: int, send: Any) -> None:
    """In a process of its own: what became of one model."""
    warnings.filterwarnings("ignore")
    from edge_client import ModelChoice, export
    from shared_hooks import WrappedModel
    from shared_hooks.errors import IsthmusError

    torch.set_num_threads(1)
    try:
        torch.manual_seed(seed)
        model, (args, kwargs) = make()
        model.eval()
        with WrappedModel(model) as wrapped:
            wrapped.plan(*args, **kwargs)
            names = [one.name for one in wrapped.cuts if one.can_split]
        chosen = sorted(random.Random(seed).sample(range(len(names)), min(cuts, len(names))))
        if not chosen:
            send.send({"state": "no cut"})
            return
        with tempfile.TemporaryDirectory() as folder:
            choice = ModelChoice(model, example=(args, kwargs), model_id="model")
            found = export(choice, split=[names[at] for at in chosen], output=folder)
        send.send(
            {
                "state": "exported",
                "written": sum(not one.refused for one in found.heads),
                "refused": {one.cut: one.refused for one in found.heads if one.refused},
                "difference": max((one.difference for one in found.heads), default=0.0),
                "labels": sum(one.labels for one in found.heads),
            }
        )
    except IsthmusError as error:
        send.send({"state": "refused", "why": f"{type(error).__name__}: {error}"[:300]})
    except Exception as error:
        send.send({"state": "failed", "why": f"{type(error).__name__}: {error}"[:300]})


def run(models: dict[str, Callable[[], Made]], cuts: int, seed: int) -> Iterator[dict[str, Any]]:
    """One after the other."""
    from shared_hooks.mapping.onnx_export import converted

    converted(torch.nn.ReLU(), [torch.zeros(1)], ["x"], ["y"])  # what an exporter imports is then every child's
    forking = multiprocessing.get_context("fork")
    for name, make in models.items():
        receive, send = forking.Pipe(duplex=False)
        child = forking.Process(target=judge, args=(make, cuts, seed, send))
        began = time.monotonic()
        child.start()
        send.close()
        try:
            found = receive.recv() if receive.poll(SECONDS) else {"state": "failed", "why": "not in time"}
        except EOFError:
            found = {"state": "failed", "why": "the process ended"}
        child.kill()
        child.join()
        yield {"model": name, **found, "seconds": round(time.monotonic() - began, 1)}


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the reasons of refusals."""
    exported = [one for one in found if one["state"] == "exported"]
    reasons = Counter(why.rpartition(": ")[2][:80] for one in exported for why in one["refused"].values()) + Counter(
        one["why"][:80] for one in found if one["state"] in ("refused", "failed")
    )
    return {
        "models": len(found),
        **Counter(one["state"] for one in found),
        "every sampled cut": sum(not one["refused"] for one in exported),
        "heads": sum(one["written"] for one in exported),
        "cuts refused": sum(len(one["refused"]) for one in exported),
        "largest difference": max((one["difference"] for one in exported), default=0.0),
        "labels changed": sum(one["labels"] for one in exported),
        "reasons": dict(reasons.most_common(12)),
    }


def shipped() -> list[dict[str, Any]]:
    """The shipped model's pictures through every head and a real server: 32 are compared at the export, 40 asked."""
    from edge_client import LightClient, ModelChoice, export, local_server
    from shared_hooks.models import digits, load_spec

    pictures = sorted((Path(digits.__file__).parent / "images").glob("*.png"))
    spec = load_spec("digits")
    model = spec.load_model()
    with torch.no_grad():
        wanted = [model(*spec.preprocess(one)[0]) for one in pictures]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        made = export("digits", [str(one) for one in pictures[:32]], split="all", output=folder)
        cuts = [one.cut for one in made.heads if not one.refused]
        with local_server(ModelChoice("digits"), arguments=["--tails", "all"]) as server:
            for codec in ("raw", "lz4", "fp16", "int8", "int6"):
                off, bound, labels, held, asked = 0.0, 0.0, 0, 0, 0
                for cut in cuts:
                    with LightClient(server, folder, cut, codec=codec) as client:
                        worst = 0.0
                        for picture, whole in zip(pictures, wanted, strict=True):
                            answer = client.infer_file(picture)
                            found = torch.from_numpy(answer.output.copy())
                            worst = max(worst, float((found - whole).abs().max() / whole.abs().max()))
                            labels += int(found.argmax() != whole.argmax())
                            asked += 1
                        off, bound = max(off, worst), max(bound, answer.difference)
                        held += worst <= max(answer.difference, 1e-6)
                rows.append(
                    {
                        "codec": codec,
                        "cuts": len(cuts),
                        "answers": asked,
                        "labels changed": labels,
                        "largest difference": off,
                        "largest bound": bound,
                        "cuts within their own bound": held,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Exit status 1 where a model failed otherwise than by a refusal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", help="of studies.library; none: the zoo of the tests")
    parser.add_argument("--models", type=int, default=40, help="of each family")
    parser.add_argument("--cuts", type=int, default=4, help="of each model")
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shipped", action="store_true", help="the shipped model's pictures through a server")
    options = parser.parse_args()
    if options.shipped:
        options.json.write_text(json.dumps(shipped(), indent=1) + "\n")
        return 0
    sources = {one: of_family(one, options.models, options.seed) for one in options.family or ()} or {"zoo": of_zoo()}
    written = {}
    for family, models in sources.items():
        found: list[dict[str, Any]] = []
        for one in run(models, options.cuts, options.seed):
            found.append(one)
            print(json.dumps({"family": family, **one})[:400], flush=True)
            written[family] = {**summary(found), "found": found}
            options.json.write_text(json.dumps(written, indent=1) + "\n")
        print(json.dumps(summary(found), indent=1))
    failed = [one for family in written.values() for one in family["found"] if one["state"] == "failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
