"""Mutated input files, to a server and on an edge: ``python -m studies.attacks.files``.

Files of every kind that inputs may have (and ``.npz``, which is none) are changed at a few places: bytes, lengths of
chunks, numbers in headers, tags, scans, parts of other files; checksums are put right again, so that decoders see what
was changed. Half of them go to a real server, as ``cloud-only-file``, beside an honest client; half are read on an
edge. Nothing may crash, hang, or take more memory than the limits say. ``--tally FILE``: runs add up, by seed.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import random
import re
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import torch

from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from shared_hooks.errors import IsthmusError
from shared_hooks.models import load_spec
from shared_hooks.picture import BYTES_A_PIXEL, MAX_OWN_PIXELS, SPARE_BYTES
from shared_hooks.tensors import identical
from studies.attacks.pressure import DECODER_MIB, KEPT_MIB, LIMITS, MIB, inflating
from studies.siege.hostile import through
from studies.siege.processes import Server

MODEL = "digits"
SIDES = ("server", "edge")
THREADS = 2
HONEST_EVERY = 0.05
WORST = 0.5
LARGEST = (1 << 10, 1 << 16, 40_000, 1 << 24, 1 << 31, (1 << 31) - 1, (1 << 32) - 1)


def seeds(large: bool = True) -> list[tuple[str, bytes]]:
    """(suffix, bytes) of good files, and hostile ones. ``large``: pictures of 64 megapixels too, which an edge reads of
    its own files, half a second each."""
    import safetensors.torch
    from PIL import Image

    draw = np.random.default_rng(1)
    picture = Image.fromarray(draw.integers(0, 255, (32, 32), np.uint8))
    colours = Image.fromarray(draw.integers(0, 255, (40, 56, 3), np.uint8))
    found: list[tuple[str, bytes]] = []
    for suffix, kind, images, hows in (
        (".png", "PNG", (picture, colours), ({}, {"interlace": 1})),
        (".jpg", "JPEG", (picture, colours), ({}, {"progressive": True}, {"restart_marker_blocks": 1})),
        (".webp", "WEBP", (picture, colours), ({}, {"lossless": True})),
        (".gif", "GIF", (picture, colours), ({}, {"save_all": True, "append_images": [picture] * 3})),
        (".tiff", "TIFF", (picture, colours), ({}, {"compression": "tiff_lzw"}, {"compression": "jpeg"})),
        (".bmp", "BMP", (picture, colours), ({},)),
    ):
        for image in images:
            for how in hows:
                file = io.BytesIO()
                image.save(file, kind, **how)
                found.append((suffix, file.getvalue()))
    for dtype, shape, order in (("<f4", (1, 1, 32, 32), "C"), (">f8", (2, 1, 32, 32), "F"), ("|b1", (3,), "C")):
        file = io.BytesIO()
        np.save(file, np.asarray(draw.random(shape), dtype, order=order))  # type: ignore[arg-type]
        found.append((".npy", file.getvalue()))
    file = io.BytesIO()
    np.savez_compressed(file, x=np.zeros((1, 1, 32, 32), np.float32))
    found.append((".npz", file.getvalue()))
    tensors = {"0": torch.zeros(1, 1, 32, 32)}, {"x": torch.zeros(1, 1, 32, 32), "y": torch.zeros(2, dtype=torch.int64)}
    found += [(".safetensors", safetensors.torch.save(one)) for one in tensors]
    return found + [one for one in inflating() if large or one[0] not in (".png", ".webp", ".gif", ".tiff")]


def mutated(files: list[tuple[str, bytes]], draw: random.Random) -> tuple[str, bytes]:
    """One of them, changed."""
    suffix, data = draw.choice(files)
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        _change(made, suffix, files, draw)
    if suffix == ".png" and draw.random() < 0.8:
        made = _with_sums(made)
    if draw.random() < 0.03:
        suffix = draw.choice([one for one, _ in files])
    return suffix, bytes(made)


def _change(made: bytearray, suffix: str, files: list[tuple[str, bytes]], draw: random.Random) -> None:
    if not made:
        return
    early = min(len(made), 200) if draw.random() < 0.7 else len(made)  # headers are where the harm is
    at, how = draw.randrange(early), draw.randrange(8)
    if how == 0:
        made[at] ^= 1 << draw.randrange(8)
    elif how == 1:
        made[at] = draw.choice((0, 1, 127, 128, 255))
    elif how in (2, 3):
        form = draw.choice(("<H", ">H", "<I", ">I", "<Q"))
        size = struct.calcsize(form)
        number = min(draw.choice(LARGEST), 256**size - 1)
        made[at : at + size] = struct.pack(form, number)
    elif how == 4:
        del made[draw.randrange(len(made)) :]
    elif how == 5:
        part = bytes(made[at : at + draw.choice((1, 8, 64, 512))])
        made[at:at] = part * draw.choice((1, 3, 100))
    elif how == 6:
        other = draw.choice(files)[1]
        start = draw.randrange(len(other))
        made[at : at + 64] = other[start : start + 64]
    elif suffix in (".npy", ".safetensors"):
        numbers = list(re.finditer(rb"\d+", bytes(made[:400])))
        if numbers:
            one = draw.choice(numbers)
            text = draw.choice((b"0", b"-1", b"1e9", str(draw.choice(LARGEST)).encode(), b"9" * 30))
            made[one.start() : one.end()] = text
    else:
        made.insert(at, draw.randrange(256))


def _with_sums(made: bytearray) -> bytearray:
    """A PNG whose chunks have their right checksums."""
    at = 8
    while at + 12 <= len(made):
        length = int.from_bytes(made[at : at + 4], "big")
        end = at + 8 + length
        if end + 4 > len(made):
            break
        made[end : end + 4] = zlib.crc32(bytes(made[at + 4 : end])).to_bytes(4, "big")
        at = end + 4
    return made


def honest(address: str, queue: Any, over: Any) -> None:
    """Asks all the time; reports (answers, wrong, errors, the longest wait in seconds)."""
    torch.set_num_threads(1)
    x = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(3))
    counted, worst = Counter[str](), 0.0
    with EdgeClient(address, ModelChoice(MODEL, device="cpu", threads=1), metrics=False) as client, torch.no_grad():
        wanted = client.wrapped.whole(x)
        for cut in ("input", "stage1.0.conv1"):
            client.infer(x, split=cut)
        queue.put("ready")
        while not over.wait(HONEST_EVERY):
            began = time.monotonic()
            try:
                output = client.infer(x, split=("input", "stage1.0.conv1")[counted["answers"] % 2]).output
                counted["wrong"] += not identical(output, wanted)
                counted["answers"] += 1
            except IsthmusError as error:
                counted[type(error).__name__] += 1
            worst = max(worst, time.monotonic() - began)
    queue.put((dict(counted), worst))


def sender(address: str, seed: int, count: int, until: float, queue: Any) -> None:
    """The hostile client: so many files to the server, some at a time."""
    torch.set_num_threads(1)
    files, counted, slowest, lock = seeds(), Counter[str](), 0.0, threading.Lock()
    address = through("127.0.0.2", address)
    numbers = iter(range(count))

    def work(client: EdgeClient, folder: Path, thread: int) -> None:
        nonlocal slowest
        while time.time() < until:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            suffix, data = mutated(files, random.Random(f"{seed} {number}"))
            file = folder / f"{thread}{suffix}"
            file.write_bytes(data)
            began = time.monotonic()
            try:
                client.infer(file, split="cloud-only-file")
                word = "answered"
            except IsthmusError as error:
                word = type(error).__name__
            except OSError as error:
                word = type(error).__name__
            with lock:
                counted[word] += 1
                counted["files"] += 1
                slowest = max(slowest, time.monotonic() - began)

    with (
        tempfile.TemporaryDirectory() as name,
        EdgeClient(address, ModelChoice(MODEL, device="cpu", threads=1), metrics=False) as client,
    ):
        threads = [threading.Thread(target=work, args=(client, Path(name), n), daemon=True) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            with lock:
                queue.put((dict(counted), slowest))
    queue.put((dict(counted), slowest))
    queue.put(None)


def reader(seed: int, count: int, until: float, queue: Any) -> None:
    """The edge: files that are read here, as `EdgeClient.infer` reads paths and bytes."""
    torch.set_num_threads(1)
    spec, files, counted = load_spec(MODEL), seeds(large=False), Counter[str]()
    slowest, frozen, reported = 0.0, [0.0], time.monotonic()

    def beat() -> None:
        last = time.monotonic()
        while True:
            time.sleep(0.01)
            now = time.monotonic()
            frozen[0], last = max(frozen[0], now - last), now

    threading.Thread(target=beat, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        queue.put(({}, 0.0, 0.0))
        for number in range(count):
            if time.time() > until:
                break
            suffix, data = mutated(files, random.Random(f"{seed} {number} edge"))
            file = Path(name) / f"one{suffix}"
            file.write_bytes(data)
            began = time.monotonic()
            try:
                if number < count // 2:
                    spec.preprocess(file)
                else:
                    spec.preprocess_bytes(suffix, data)
                counted["read"] += 1
            except IsthmusError as error:
                counted[type(error).__name__] += 1
            except Exception as error:
                counted[f"OUTSIDE {type(error).__name__}: {error!s:.80} ({seed} {number} edge)"] += 1
            counted["files"] += 1
            slowest = max(slowest, time.monotonic() - began)
            if time.monotonic() > reported + 1:
                queue.put((dict(counted), slowest, frozen[0]))
                reported = time.monotonic()
    queue.put((dict(counted), slowest, frozen[0]))
    queue.put(None)


def _heard(queue: Any, patience: float) -> Iterator[Any]:
    """What comes, until None does."""
    while (said := queue.get(timeout=patience)) is not None:
        yield said


def on_server(seed: int, count: int, minutes: float, folder: Path) -> dict[str, Any]:
    """One run against a server of its own."""
    tables = {"": {"listen": "127.0.0.1:0", "threads": 1}, "models": {MODEL: MODEL}, "limits": LIMITS}
    server = Server(folder / "server", tables)
    context = multiprocessing.get_context("spawn")
    asked, sent, over = context.Queue(), context.Queue(), context.Event()
    good = context.Process(target=honest, args=(server.address, asked, over), daemon=True)
    bad = context.Process(
        target=sender, args=(server.address, seed, count, time.time() + 60 * minutes, sent), daemon=True
    )
    counted: dict[str, int] = {}
    slowest = 0.0
    try:
        good.start()
        assert asked.get(timeout=120) == "ready"
        rest, began = server.resident(), time.monotonic()
        bad.start()
        for said in _heard(sent, 120):
            counted, slowest = said
        over.set()
        answers, worst = asked.get(timeout=60)
        peak, last = server.peak(began), server.resident()
    finally:
        for process in (bad, good):
            if process.pid is not None:
                process.kill()
                process.join()
        status, _ = server.drain()
    log = server.log_bytes
    return {
        "seed": seed,
        "counted": counted,
        "slowest_s": round(slowest, 2),
        "honest": answers,
        "honest_worst_s": round(worst, 3),
        "above_mib": round(peak - rest),
        "grown_mib": round(last - rest),
        "limits_mib": KEPT_MIB + DECODER_MIB,
        "exit_status": status,
        "log_bytes": log,
    }


def on_edge(seed: int, count: int, minutes: float) -> dict[str, Any]:
    """One run in a process that reads files."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=reader, args=(seed, count, time.time() + 60 * minutes, queue))
    process.start()
    queue.get(timeout=120)
    looking, over = psutil.Process(process.pid), threading.Event()
    rest, looks = _resident(looking), [0.0]

    def look() -> None:
        while not over.wait(0.02):
            try:
                looks[0] = max(looks[0], _resident(looking))
            except psutil.Error:
                return

    threading.Thread(target=look, daemon=True).start()
    counted: dict[str, int] = {}
    slowest = frozen = 0.0
    for said in _heard(queue, 120):
        counted, slowest, frozen = said
    over.set()
    process.join(30)
    # a picture of MAX_OWN_PIXELS, decoded, and the decoder's spare room
    return {
        "seed": seed,
        "counted": counted,
        "slowest_s": round(slowest, 2),
        "frozen_s": round(frozen, 3),
        "above_mib": round(looks[0] - rest),
        "limits_mib": (SPARE_BYTES + BYTES_A_PIXEL * MAX_OWN_PIXELS) // MIB,
        "exit_status": process.exitcode,
    }


def _resident(process: psutil.Process) -> float:
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.Error:
            continue
    return total / MIB


def faults(side: str, row: dict[str, Any]) -> list[str]:
    """What falls short."""
    found = [key for key in row["counted"] if key.startswith("OUTSIDE")]
    if row["above_mib"] > 1.2 * row["limits_mib"]:
        found.append(f"{row['above_mib']} MiB where {row['limits_mib']} are allowed")
    if row["exit_status"] != 0:
        found.append(f"exit status {row['exit_status']}")
    if side == "server" and row["honest_worst_s"] > WORST:
        found.append(f"an honest client waited {row['honest_worst_s']} s")
    if side == "server" and (row["honest"].get("wrong") or set(row["honest"]) - {"answers", "wrong"}):
        found.append(f"honest answers: {row['honest']}")
    if side == "edge" and row["frozen_s"] > 1:
        found.append(f"the edge's other threads stood still for {row['frozen_s']} s")
    return found


def main() -> int:
    """The exit status: 0 if nothing falls short."""
    parser = argparse.ArgumentParser(prog="python -m studies.attacks.files", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--files", type=int, default=200_000, help="of both sides together")
    parser.add_argument("--minutes", type=float, default=10, help="for each side, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--tally", type=Path, metavar="FILE", help="JSON, to which this run adds")
    options = parser.parse_args()
    kept: dict[str, Any] = {side: [] for side in SIDES}
    if options.tally and options.tally.exists():
        kept = json.loads(options.tally.read_text())
    fell = False
    with tempfile.TemporaryDirectory(prefix="isthmus-files-") as name:
        for side in options.sides:
            if options.seed in [row["seed"] for row in kept[side]]:
                print(f"seed {options.seed} is in {options.tally} already: take another --seed", file=sys.stderr)
                return 2
            run = on_edge if side == "edge" else on_server
            more = () if side == "edge" else (Path(name),)
            row = run(options.seed, options.files // 2, options.minutes, *more)
            row["faults"] = faults(side, row)
            kept[side].append(row)
            fell |= bool(row["faults"])
            print(f"{side}: {json.dumps(row)}", flush=True)
            if options.tally:
                options.tally.write_text(json.dumps(kept, indent=1) + "\n")
    for side in SIDES:
        total = sum(row["counted"].get("files", 0) for row in kept[side])
        if total:
            above = max(row["above_mib"] for row in kept[side])
            fell_short = sum(len(row["faults"]) for row in kept[side])
            print(f"{side}: {total:,} files in all, at most {above} MiB, {fell_short} faults")
    return 1 if fell else 0


if __name__ == "__main__":
    sys.exit(main())
