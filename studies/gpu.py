"""The first ten minutes with an accelerator: does everything run there, is it exact, how fast is it.

    python -m studies.gpu --json gpu.json                 # make gpu
    python -m studies.gpu --json gpu.json --resume        # what is not in the file yet
    python -m studies.gpu --device isolated --only exact  # on the test device of studies/device

Uses the Python and the PyTorch that are there, and no network. The file is written after each section, and
a page beside it (gpu.md). Without an accelerator it says what it would do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {"grpc": "grpcio", "google.protobuf": "protobuf", "numpy": "numpy", "psutil": "psutil", "lz4": "lz4"}
NEEDED |= {"xxhash": "xxhash", "zstandard": "zstandard", "safetensors": "safetensors", "PIL": "pillow"}
NEEDED |= {"rich": "rich", "pynvml": "nvidia-ml-py", "grpc_health": "grpcio-health-checking"}
NEEDED |= {"grpc_reflection": "grpcio-reflection", "prometheus_client": "prometheus-client", "greenlet": "greenlet"}
NEEDED |= {"pytest": "pytest", "hypothesis": "hypothesis"}
PACKAGES = ROOT / "build" / "gpu"
MINUTES = 10.0
TESTS = (
    "tests/shared_hooks/tensors/test_staging.py",
    "tests/shared_hooks/codecs/test_there_and_back.py",
    "tests/shared_hooks/compiling/test_tails.py",
    "tests/shared_hooks/models/test_device.py",
    "tests/shared_hooks/metrics",
)
OWN_PROCESS = ("cuda", "xpu", "mps")
"""Kinds whose server is a process of its own here; a plug-in's would have to be loaded there."""
Found = dict[str, Any]


class Run:
    """What every section is given: the device, and until when it may measure."""

    def __init__(self, device: str, quick: bool) -> None:
        import torch

        from shared_hooks import devices

        self.device = devices.pick(device)
        self.quick = quick
        self.torch, self.devices = torch, devices

    def median_ms(self, work: Callable[[], Any], seconds: float = 1.0) -> float:
        """Return the median time of ``work`` with a wait for the device, after three runs that do not count."""
        for _ in range(3):
            work()
        self.devices.synchronize(self.device)
        took: list[float] = []
        until = time.perf_counter() + (seconds / 5 if self.quick else seconds)
        while len(took) < 5 or time.perf_counter() < until:
            began = time.perf_counter()
            work()
            self.devices.synchronize(self.device)
            took.append((time.perf_counter() - began) * 1e3)
        return round(statistics.median(took), 4)

    @contextmanager
    def serving(self, model: str, **limits: int) -> Iterator[str]:
        """A server of ``model`` on the device: a process of its own; of a plug-in's kind in this one."""
        table = "\n".join(["[limits]", *(f"{key} = {value}" for key, value in limits.items()), ""]) if limits else ""
        if self.device.type in OWN_PROCESS:
            from edge_client import ModelChoice, local_server

            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "server.toml"
                file.write_text(table)
                with local_server(ModelChoice(model, device=str(self.device)), arguments=[str(file)]) as address:
                    yield address
        else:
            from studies.device.service import serving

            with serving(str(self.device), table) as (address, _):
                yield address


def machine(run: Run) -> Found:
    """Its name, and the versions that figures belong to."""
    import platform

    torch = run.torch
    return {
        "device": run.devices.name_of(run.device),
        "kind": run.device.type,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }


def tests(run: Run) -> Found:
    """The tests that only run with a device, and their neighbours."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"summary": lines[-1] if lines else done.stderr[-200:], "failed": failed, "ok": done.returncode == 0}


def exact(run: Run) -> Found:
    """Heads and tails of the zoo, both on the device, through bytes, bit for bit."""
    from studies.device import zoo
    from tests.zoo import CASES

    here = str(run.device)
    numbers = list(range(0, len(CASES), 8 if run.quick else 1))
    judged = zoo.run(numbers, False, lambda one: None, on=(here, here), seconds=20 if run.quick else 120)
    wrong = [one for one in judged if one["state"] not in ("exact", "left out")]
    counts = Counter(one["state"] for one in judged)
    return {
        "models": len(judged),
        "cuts": sum(one["cuts"] for one in judged),
        **counts,
        "wrong": wrong,
        "ok": not wrong,
    }


def unlike(run: Run) -> Found:
    """Heads on the processor, tails on the device: the largest difference of the output, and other labels."""
    from shared_hooks import EarlyOutput, WrappedModel
    from shared_hooks.models import load_spec

    torch, spec = run.torch, load_spec("digits")
    images = torch.rand(32, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    largest = labels = 0.0
    with WrappedModel(spec.load_model("cpu")) as edge, WrappedModel(spec.load_model(str(run.device))) as cloud:
        edge.plan(images)
        whole = edge.whole(images)
        places = [one.name for one in edge.cuts if one.can_split]
        for place in places:
            early = edge.forward(images, end=place)
            answer = cloud.forward(EarlyOutput.from_bytes(early.to_bytes())).cpu()
            largest = max(largest, float((answer - whole).abs().max()))
            labels += int((answer.argmax(1) != whole.argmax(1)).sum())
    scale = float(whole.abs().max())
    return {"cuts": len(places), "largest difference": largest, "largest output": scale, "other labels": int(labels)}


def tails(run: Run) -> Found:
    """A tail, and the whole plain model, eager and as a graph; a small CNN and a ViT, milliseconds."""
    from shared_hooks import WrappedModel
    from studies.benchmarks.networks import ViT, built, image

    found: Found = {}
    for name, model in (("small CNN", _small(run)), ("ViT", built(ViT).to(run.device))):
        given = (run.torch.rand(1, 1, 32, 32) if name == "small CNN" else image()).to(run.device)
        with run.torch.no_grad():
            row = {"plain model": run.median_ms(partial(model, given))}
            if run.devices.has_graphs(run.device):
                graph, _ = run.devices.recorded(run.device, partial(model, given), 3)
                row["plain model as a graph"] = run.median_ms(graph.replay)
            with WrappedModel(model) as wrapped:
                wrapped.plan(given)
                places = [one.name for one in wrapped.cuts if one.can_split]
                early = wrapped.forward(given, end=places[0])
                row[f"tail after {places[0]}"] = run.median_ms(partial(wrapped.forward, early))
                row["the same, compiled"] = _compiled(run, wrapped, places[0], given)
        found[name] = row
    return found


def _compiled(run: Run, wrapped: Any, place: str, given: Any) -> float | str:
    """Milliseconds of a tail whose modules are compiled (`shared_hooks.compiling`), or why it is not."""
    from shared_hooks.compiling import CompiledTails, Standing

    compiled = CompiledTails(wrapped, rounding=True, wins=lambda *_: True)
    try:
        compiled.add(wrapped.head(place, given))
        until = time.monotonic() + (20 if run.quick else 60)
        while time.monotonic() < until:
            ((standing, why),) = compiled.standings().values()
            if standing == Standing.REFUSED.value:
                return f"refused: {why}"[:160]
            early = wrapped.head(place, run.torch.rand_like(given))
            parcel = early.pack("raw")
            found = compiled.of(early.crossing, parcel.header, memoryview(b"".join(map(bytes, parcel.buffers))))
            if found is not None:
                return run.median_ms(partial(wrapped.tail, early, substitutes=found))
            time.sleep(0.05)
        return "not in time"
    finally:
        compiled.close()


def _small(run: Run) -> Any:
    from shared_hooks.models import load_spec

    return load_spec("digits").load_model(str(run.device))


def staging(run: Run) -> Found:
    """Copies of 0.1 to 16 MB, by pinned memory on streams of their own, and plain; milliseconds."""
    from shared_hooks.tensors import staging as ours

    torch, found = run.torch, {}
    for nbytes in (100_000, 1_000_000, 16_000_000):
        there = torch.rand(nbytes // 4).to(run.device)
        pinned = ours.room(nbytes, run.device).view(torch.float32)
        plain = torch.rand(nbytes // 4)
        found[f"{nbytes / 1e6:g} MB"] = {
            "to host": run.median_ms(partial(ours.to_host, there), 0.4),
            "to host, plain": run.median_ms(there.cpu, 0.4),
            "to device": run.median_ms(partial(ours.to_device, pinned, run.device), 0.4),
            "to device, plain": run.median_ms(partial(plain.to, run.device), 0.4),
        }
    return {**found, "pinned": run.devices.pins(run.device)}


def codecs(run: Run) -> Found:
    """A frontier of 1.6 MB as bytes: coded on the device before the copy; milliseconds and bytes."""
    from shared_hooks import WrappedModel

    found = {}
    given = run.torch.rand(96, 1, 32, 32).to(run.device)
    with WrappedModel(_small(run)) as wrapped:
        wrapped.plan(given)
        early = wrapped.forward(given, end="stem")
        for codec in ("raw", "lz4", "bf16", "int8", "int4"):
            data = early.to_bytes(codec)
            found[codec] = {"ms": run.median_ms(partial(early.to_bytes, codec), 0.4), "bytes": len(data)}
    return found


def requests(run: Run) -> Found:
    """A request from the processor to the device over loopback, milliseconds; and clients at once, answers a second."""
    from edge_client import EdgeClient, ModelChoice

    torch = run.torch
    choice, given = ModelChoice("digits", device="cpu"), torch.rand(1, 1, 32, 32)
    found: Found = {}
    batches = {"max_batch_size": 32, "max_queue_delay_microseconds": 2000}
    for name, limits in (("alone", {}), ("batched", batches)):
        with run.serving("digits", **limits) as address:
            with EdgeClient(address, choice, "stem") as client:
                found.setdefault("request ms", run.median_ms(partial(client.infer, given), 2.0))
            for count in (1, 4, 16) if run.quick else (1, 4, 16, 64):
                found[f"{count} clients, {name}"] = round(_answers(address, choice, given, count, run.quick), 1)
    return found


def _answers(address: str, choice: Any, given: Any, count: int, quick: bool) -> float:
    """A second, of ``count`` clients with four requests each under way."""
    from edge_client import EdgeClient

    seconds, answered = 1.0 if quick else 3.0, [0] * count

    def ask(number: int, client: EdgeClient) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for one in [client.submit(given) for _ in range(4)]:
                one.result()
                answered[number] += 1

    with ExitStack() as stack:
        clients = [
            stack.enter_context(EdgeClient(address, choice, "input", exact=False, metrics=False)) for _ in range(count)
        ]
        for client in clients:  # the first few are looked at: a cut that is new, rows that are computed together
            client.infer(given)
            for one in [client.submit(given) for _ in range(8)]:
                one.result()
        took = _at_once([partial(ask, number, client) for number, client in enumerate(clients)])
    return sum(answered) / took


def _at_once(works: list[Callable[[], Any]]) -> float:
    """Seconds until all are done, each in a thread of its own. Raises what one of them raises."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(works)) as pool:
        for one in [pool.submit(work) for work in works]:
            one.result()
    return time.perf_counter() - began


def generation(run: Run) -> Found:
    """Milliseconds a token of split generation: one session, and several at once."""
    import torch

    from edge_client import EdgeClient, ModelChoice, SplitGenerator

    if importlib.util.find_spec("transformers") is None:
        return {"not run": "transformers is not installed"}
    file, tokens = str(ROOT / "examples" / "language_model.toml"), 16
    words, found = torch.tensor([[5, 9, 2, 7]]), {}
    with run.serving(file) as address, ExitStack() as stack:
        works: list[Callable[[], Any]] = []
        for count in (1, 8) if run.quick else (1, 8, 32):
            while len(works) < count:  # one after the other: a model with drawn weights draws from one generator
                client = stack.enter_context(EdgeClient(address, ModelChoice(file, device="cpu")))
                one = SplitGenerator(client, "model.layers.2", answer=("least",), exact=False)
                generator = stack.enter_context(one)
                works.append(partial(generator.generate, words, max_new_tokens=tokens, do_sample=False))
                works[-1]()
            found[f"{count} sessions"] = round(_at_once(works) * 1e3 / tokens / count, 3)
    return found


def onnx_heads(run: Run) -> Found:
    """A head as an ONNX file in onnxruntime's CUDA provider: milliseconds, and how far from torch's on the device."""
    from edge_client import hierarchy
    from shared_hooks import WrappedModel

    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnxscript") is None:
        return {"not run": "onnxruntime or onnxscript is not installed"}
    import onnxruntime

    wanted = {"cuda": "CUDAExecutionProvider"}.get(run.device.type, "CPUExecutionProvider")
    if wanted not in onnxruntime.get_available_providers():
        return {"not run": f"this onnxruntime has no {wanted}"}
    given = run.torch.rand(1, 1, 32, 32)
    with tempfile.TemporaryDirectory() as folder, WrappedModel(_small(run)) as wrapped:
        file = str(Path(folder) / "head.onnx")
        hierarchy("digits", split="stem", head_onnx=file)
        session = onnxruntime.InferenceSession(file, providers=[wanted])
        (name,) = [one.name for one in session.get_inputs()]
        there = given.to(run.device)
        early = wrapped.head("stem", there)
        (ours,) = [one.cpu() for one in early.tensors]
        theirs = run.torch.from_numpy(session.run(None, {name: given.numpy()})[0]).flatten()
        return {
            "provider": session.get_providers()[0],
            "onnxruntime ms": run.median_ms(partial(session.run, None, {name: given.numpy()})),
            "torch ms": run.median_ms(partial(wrapped.head, "stem", there)),
            "largest difference": float((ours - theirs).abs().max()),
        }


def energy(run: Run) -> Found:
    """Joules of two seconds of forwards by the meters of this project, and by NVML's own counter read around them."""
    if run.device.type != "cuda":
        return {"not run": f"NVML has no counter of {run.device.type}"}
    import pynvml

    from shared_hooks import WrappedModel
    from shared_hooks.metrics.energy import Gpu, find_meters

    index, uuid = run.devices.uuid_of(run.device)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(index)
    meter = find_meters().total(Gpu(index, uuid))[-1]
    given = run.torch.rand(256, 1, 32, 32).to(run.device)
    with WrappedModel(_small(run), metrics=True) as wrapped:
        wrapped.whole(given)
        before, ours = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, meter.read()
        began = time.perf_counter()
        while time.perf_counter() - began < 2.0:
            wrapped.whole(given)
        run.devices.synchronize(run.device)
        after, then = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, meter.read()
    return {"meter": meter.name, "its joules": round(then - ours, 3), "NVML's joules": round(after - before, 3)}


def memory(run: Run) -> Found:
    """Bytes in use after a tenth of 2,000 requests to a server (quick: 200), and at their end: what grows leaks."""
    from edge_client import EdgeClient, ModelChoice

    device, torch = run.device, run.torch
    with_server = device.type not in OWN_PROCESS and run.devices.counts_memory(device)
    if not with_server and run.devices.in_use(device) is None:
        return {"not run": f"{device.type} does not tell what is in use"}

    def used() -> int | None:
        """In this process with the server, else on the whole device."""
        return run.devices.allocated(device).held if with_server else run.devices.in_use(device)

    held, first = [], 20 if run.quick else 200
    with (
        run.serving("digits") as address,
        EdgeClient(address, ModelChoice("digits", device="cpu"), "stem", metrics=False) as client,
    ):
        for number in range(1, 10 * first + 1):
            client.infer(torch.rand(1, 1, 32, 32))
            if number in (first, 10 * first):
                run.devices.synchronize(device)
                held.append(used())
    return {"requests": 10 * first, "after a tenth": held[0], "at the end": held[1], "ok": held[1] <= held[0]}


SECTIONS: dict[str, Callable[[Run], Found]] = {
    "machine": machine,
    "tests": tests,
    "exact": exact,
    "unlike": unlike,
    "tails": tails,
    "staging": staging,
    "codecs": codecs,
    "requests": requests,
    "generation": generation,
    "onnx": onnx_heads,
    "energy": energy,
    "memory": memory,
}


def page(found: Found) -> str:
    """The file's content for people: a heading and a table for each section."""
    lines = [
        f"# {found.get('machine', {}).get('device', 'A device')}",
        "",
        f"`python -m studies.gpu`, {found['when']}.",
    ]
    for name, section in SECTIONS.items():
        if name not in found:
            continue
        lines += ["", f"## {name}", f"{(section.__doc__ or '').strip()}", "", "| what | found |", "|---|---|"]
        for key, value in found[name].items():
            for inner, one in value.items() if isinstance(value, dict) else ((None, value),):
                lines.append(f"| {key if inner is None else f'{key}: {inner}'} | {one} |")
    return "\n".join(lines) + "\n"


def missing() -> list[str]:
    """Packages that must be installed first, by their names in the index."""
    found = []
    for module, package in NEEDED.items():
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            found.append(package)
    return found


def prepared(wheels: str | None) -> str | None:
    """Install what is missing from ``wheels`` into a folder of this project; what is to be done where that fails."""
    sys.path.append(str(PACKAGES))
    if importlib.util.find_spec("torch") is None:
        return "this Python has no torch: GPU_PYTHON=... names the one that has"
    if not (absent := missing()):
        return None
    if wheels is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        download = f"pip download --only-binary :all: --python-version {version} -d wheels {' '.join(absent)}"
        return f"missing: {', '.join(absent)}. Where there is a network: {download}; then here: --wheels wheels"
    words = ["install", "--no-index", "--find-links", wheels, "--target", str(PACKAGES), *absent]
    done = subprocess.run([sys.executable, "-m", "pip", *words], check=False)
    importlib.invalidate_caches()
    return None if not done.returncode else f"pip could not install {', '.join(absent)} from {wheels}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help='as everywhere; "isolated": the test device (default: auto)')
    parser.add_argument("--json", default="gpu.json", metavar="FILE", help="default gpu.json")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--resume", action="store_true", help="do what is not in the file")
    parser.add_argument("--quick", action="store_true", help="a look, not a result")
    parser.add_argument("--wheels", metavar="DIR", help="install what is missing from there")
    options = parser.parse_args()
    if trouble := prepared(options.wheels):
        print(f"gpu: {trouble}", file=sys.stderr)
        return 1
    if options.device.startswith("isolated"):
        import studies.device

        studies.device.load()
    from shared_hooks.errors import IsthmusError

    try:
        run = Run(options.device, options.quick)
    except IsthmusError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1
    if run.devices.is_host(run.device):
        print("gpu: torch finds no accelerator here, so nothing is measured. With one, this would run:")
        for name, section in SECTIONS.items():
            print(f"  {name:11} {(section.__doc__ or '').strip()}")
        return 1
    file = Path(options.json)
    found: Found = json.loads(file.read_text()) if options.resume and file.exists() else {}
    began, failed = time.monotonic(), 0
    for name in options.only or SECTIONS:
        if name in found and "error" not in found[name]:
            continue
        if time.monotonic() - began > 60 * MINUTES * 0.9:
            print(f"gpu: {name} and what follows: no time left; --resume does it")
            break
        start = time.monotonic()
        try:
            found[name] = SECTIONS[name](run)
        except Exception as error:  # the other sections can still be reported
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        found[name]["seconds"] = round(time.monotonic() - start, 1)
        failed += "error" in found[name] or found[name].get("ok") is False
        found["when"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        file.write_text(json.dumps(found, indent=1) + "\n")
        file.with_suffix(".md").write_text(page(found))
        print(f"{name}: {json.dumps(found[name])[:600]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
