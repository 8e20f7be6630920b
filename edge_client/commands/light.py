"""Implement ``--heads DIR`` of ``run``, ``bench`` and ``doctor``: inputs through an exported head and its tail on a
server.

Loads no torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from edge_client.commands import common
from edge_client.commands.common import credentials_of, keywords, needed, say, show_bench
from edge_client.light import HeadFolder, LightAnswer, LightClient, provider_of
from edge_client.settings import OWN
from edge_client.sources import KEPT, camera, is_camera
from shared_hooks.errors import InputMismatch, IsthmusError, ServerUnavailable, SpecError
from shared_hooks.frames import Frame
from shared_hooks.version import __version__

TAKEN = {
    "--heads",
    "--provider",
    "--split",
    "--input",
    "--server",
    "--threads",
    "--deadline",
    "--patience",
    "--in-flight",
    "--codec",
    "--frames",
    "--queue",
    "--camera-size",
    "--camera-rate",
    "--camera-format",
    "--dashboard",
}
TAKEN |= {"--fallback", "--json", "--no-progress", "--debug", "--config", "--log-level", "--log-format"}
BENCH = {f"--{one}" for one in "arrivals clients give-up html input json rate seconds seed warmup".split()}
"""Options of `bench` alone, or of it, too."""
TAKEN |= {"--tls", "--ca", "--cert", "--key", "--server-name", "--token-file", "--insecure"}


def main(options: argparse.Namespace) -> int:
    """Send every input and print its outcome; return the exit status."""
    if unused := sorted(options.given - TAKEN):
        raise SpecError(f"{unused[0]} has no effect with --heads: the model is in its files")
    server = needed(options)
    if server == OWN:
        raise SpecError(f"--server {OWN}: a device without PyTorch has none of its own; give HOST:PORT")
    heads = HeadFolder(options.heads)
    answers: list[dict[str, Any]] = []
    with (
        _inputs(options) as (inputs, width),
        LightClient(
            server,
            heads,
            options.split,
            provider=options.provider,
            threads=options.threads,
            credentials=credentials_of(options),
            deadline=options.deadline,
            patience=options.patience,
            fallback=options.fallback,
            codec=options.codec,
        ) as client,
        _page(client, options.dashboard),
    ):
        begun: deque[tuple[str, str]] = deque()
        for answer in client.infer_many(_noted(inputs, begun), in_flight=options.in_flight):
            name, file = begun.popleft()
            if isinstance(answer, LightAnswer):
                print(_line(name.ljust(width), answer), flush=True)
                answers.append(_as_dict(file, answer))
            elif isinstance(answer, ServerUnavailable):
                raise answer
            else:
                say(f"{file}: {type(answer).__name__}: {answer}")
                answers.append({"file": file, "error": f"{type(answer).__name__}: {answer}"})
        good = [one for one in answers if "error" not in one]
        print(_summary(heads, client.split, options.codec, answers, good))
    if options.json:
        text = json.dumps({"model": heads.model, "split": client.split, "answers": answers}, indent=2) + "\n"
        if options.json == "-":
            options.stdout.write(text)
        else:
            from shared_hooks.files import write_text

            write_text(options.json, text, "--json")
    return common.OK if len(good) == len(answers) else common.SOME_FAILED


def _page(client: LightClient, listen: str | None) -> AbstractContextManager[Any]:
    """Return a run's dashboard, if requested."""
    if listen is None:
        return nullcontext()
    from edge_client.live import LightDashboard

    page = LightDashboard(client, listen)
    say(f"dashboard at {page.url}")
    return page


def bench(options: argparse.Namespace) -> int:
    """Put an open load on a server with clients without PyTorch; return the exit status."""
    from edge_client.benching.light import bench_heads

    if unused := sorted(options.given - BENCH - TAKEN):
        raise SpecError(f"{unused[0]} has no effect with --heads: heads run in each client, in onnxruntime")
    server = needed(options)
    if server == OWN:
        raise SpecError(f"--server {OWN}: a device without PyTorch has none of its own; give HOST:PORT")
    if "--split" not in options.given:
        options.split = None
    files = [str(one) for one in _files(options.input)] if options.input else None
    return show_bench(options, lambda: bench_heads(server, options.heads, files, **keywords(options, bench_heads)))


def doctor(options: argparse.Namespace) -> int:
    """Diagnose what keeps these heads from a server's answers, one line each; return exit status 1 if anything is
    wrong.
    """
    import onnxruntime

    options.server = options.server or options.named
    server, wrong = needed(options), 0
    _found("ok", "versions", f"Isthmus {__version__}, onnxruntime {onnxruntime.__version__}, without PyTorch")
    heads = HeadFolder(options.heads)
    provider = provider_of(options.provider)
    _found("ok", "heads", f"{heads.model}: {len(heads.cuts)} in {heads.folder}, every file as it was exported")
    _found("ok", "provider", f"{provider}, of {', '.join(onnxruntime.get_available_providers())}")
    for cut in heads.cuts:
        zeros = heads.zeros(cut)
        client = LightClient(
            server, heads, cut, provider=options.provider, credentials=credentials_of(options), patience=0.0
        )
        try:
            with client:
                client.infer(*zeros)
                answer = client.infer(*zeros)
            took = f"{answer.end_to_end_ns / 1e6:.1f} ms, head {answer.head_ns / 1e6:.1f} ms"
            _found("ok", cut, f"{took}, {answer.bytes_up} bytes up; off by {answer.difference:.1e}")
        except InputMismatch as error:
            _found("warning", cut, f"zeros are no input of this head: {error}")
        except IsthmusError as error:
            wrong += 1
            _found("wrong", cut, f"{type(error).__name__}: {error}")
            if isinstance(error, ServerUnavailable):
                break
    return common.SOME_FAILED if wrong else common.OK


def _found(level: str, about: str, says: str) -> None:
    print(f"{level:<8} {about:<12} {says}", flush=True)


@contextmanager
def _inputs(options: argparse.Namespace) -> Iterator[tuple[Iterable[Path | Frame], int]]:
    """Return files, or the frames of a camera (at most --frames of them), and the width of their names."""
    cameras = [word for word in options.input if is_camera(word)]
    if cameras:
        if len(options.input) > 1:
            raise SpecError("--input: a camera comes alone")
        how = {"size": options.camera_size, "rate": options.camera_rate, "pixel_format": options.camera_format}
        with camera(cameras[0], **how, queue=KEPT if options.queue is None else options.queue) as frames:
            yield islice((one for one in frames if isinstance(one, Frame)), options.frames), 0
        return
    files = _files(options.input)
    yield files, max(len(file.name) for file in files)


def _noted(inputs: Iterable[Path | Frame], begun: deque[tuple[str, str]]) -> Iterator[Path | Frame]:
    """Yield the inputs, and add the names of those started to ``begun``."""
    for one in inputs:
        begun.append((one.name, str(one)) if isinstance(one, Path) else (one.id.name, one.id.name))
        yield one


def _files(words: list[str]) -> list[Path]:
    found: list[Path] = []
    for word in words:
        path = Path(word)
        inside = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
        found += inside
    if not found:
        raise SpecError(f"--input: there is no file in {', '.join(words)}")
    return found


def _line(name: str, answer: LightAnswer) -> str:
    best = answer.predictions[0] if answer.predictions else None
    what = "" if best is None else f"{best.label} {100 * best.score:.1f} %  "
    fallen = "  (here: the server did not answer)" if answer.fallback else ""
    took = f"{answer.end_to_end_ns / 1e6:.1f} ms, head {answer.head_ns / 1e6:.1f} ms"
    return f"{name}  {what}{took}{fallen}"


def _as_dict(file: str, answer: LightAnswer) -> dict[str, Any]:
    return {
        "file": file,
        "split": answer.split,
        "predictions": [vars(one) for one in answer.predictions],
        "head_ns": answer.head_ns,
        "request_ns": answer.request_ns,
        "queue_ns": answer.queue_ns,
        "tail_ns": answer.tail_ns,
        "end_to_end_ns": answer.end_to_end_ns,
        "bytes_up": answer.bytes_up,
        "fallback": answer.fallback or None,
    }


def _summary(
    heads: HeadFolder, split: str, codec: str, answers: list[dict[str, Any]], good: list[dict[str, Any]]
) -> str:
    lines = [f"\n{heads.model}, head up to {split} in onnxruntime: {len(good)} of {len(answers)} inputs answered"]
    if good:
        median = statistics.median(one["end_to_end_ns"] for one in good) / 1e6
        lines.append(
            f"latency: median {median:.1f} ms; {statistics.mean(one['bytes_up'] for one in good):.0f} bytes up"
        )
    if split in heads.heads:
        head = heads.heads[split]
        difference = head.codecs.get(codec, head.difference)
        lines.append(f"answers are within {difference:.1e} of the model's, as measured when the head was exported")
    return "\n".join(lines)
