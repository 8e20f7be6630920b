"""A real server and real clients on a device that is none: everything a service does, once.

    python -m studies.device.service

Each line is one thing that was done and compared bit for bit, or what went wrong. The server is in this process,
because a device belongs to the process that has loaded it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import studies.device as device
from cloud_server.config import ServerConfig, read_config
from cloud_server.core import Core
from cloud_server.fleet import Fleet, ThisProcess
from cloud_server.transport import CloudServer
from edge_client import EdgeClient, ModelChoice, SplitGenerator, local_server
from edge_client.probing import fetch_profile
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import IsthmusError
from shared_hooks.models import load_spec
from shared_hooks.observers import Custom
from tests.shared_hooks.cutting import through_bytes

SERVED = f"{device.NAME}:0"
OTHER = f"{device.NAME}:1"


@contextmanager
def served(file: Path) -> Iterator[tuple[str, Fleet]]:
    """A server of what a file says: its address."""
    config: ServerConfig = read_config(file)
    fleet = Fleet(ThisProcess(config), config.models, lambda: read_config(file).models)
    workers = config.workers * len(config.device.split(","))
    server = CloudServer(Core(fleet, config.limits, workers, observers=config.observers), "127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{server.port}", fleet
    finally:
        server.stop(grace=1)


@contextmanager
def serving(on: str = SERVED, more: str = "") -> Iterator[tuple[str, Fleet]]:
    """A server of the shipped model and a language model on ``on``: its address."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "server.toml"
        llm = Path("examples/language_model.toml").resolve()
        observers = '[observers]\nallow = ["activation", "memory", "debug"]\n'
        file.write_text(f'device = "{on}"\n{observers}[models]\ndigits = "digits"\nlanguage-model = "{llm}"\n{more}')
        with served(file) as found:
            yield found


def choice(on: str, **more: Any) -> ModelChoice:
    return ModelChoice("digits", device=on, **more)


def image(number: int = 0) -> torch.Tensor:
    return torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(number))


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(found.cpu(), wanted.cpu()):
        raise AssertionError(f"other bits, {(found.cpu() - wanted.cpu()).abs().max()} apart")


def requests() -> str:
    """From the processor and from another device, at cuts all over the model."""
    count = 0
    with serving() as (address, _):
        for on in ("cpu", OTHER, SERVED):
            with EdgeClient(address, choice(on), "input") as client:
                if client.device != torch.device(on):
                    raise AssertionError(f"{client.device} instead of {on}")
                client.infer(image())
                for place in client.wrapped.cuts[::7]:
                    answer = client.infer(image(count), split=place.name)
                    same(answer.output, client.infer(image(count), split="edge-only").output)
                    count += 1
    return f"{count} requests from the processor and two devices"


def many() -> str:
    """Several under way, from several clients at once."""
    errors: list[BaseException] = []
    with serving() as (address, _):

        def ask(number: int) -> None:
            try:
                with EdgeClient(address, choice(OTHER), "stage2.0.conv2") as client:
                    images = [image(100 * number + one) for one in range(16)]
                    for given, answer in zip(images, client.infer_many(images), strict=True):
                        same(answer.output, client.infer(given, split="edge-only").output)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for one in (*threads,):
            one.start()
        for one in threads:
            one.join()
    if errors:
        raise errors[0]
    return "48 requests of three clients, as many under way as fit"


def batches() -> str:
    """Requests that allow it are computed together."""
    together = 0
    with serving(more="[limits]\nmax_batch_size = 8\nmax_queue_delay_microseconds = 20000\n") as (address, _):
        clients = [EdgeClient(address, choice(OTHER), "stage2.0.conv2", exact=False, metrics=False) for _ in range(4)]
        for client, _ in itertools.product(clients, range(3)):
            client.infer(image())
        for _ in range(6):
            pending = [client.submit(image(number)) for number, client in enumerate(clients)]
            for number, one in enumerate(pending):
                answer = one.result()
                together = max(together, answer.batch_size)
                wanted = clients[0].infer(image(number), split="edge-only").output
                torch.testing.assert_close(answer.output.cpu(), wanted.cpu())
        for client in clients:
            client.close()
    return f"up to {together} requests computed as one"


def staging() -> str:
    """Values that are large enough for pinned memory and streams of their own, with more than one codec."""
    dice = torch.Generator().manual_seed(1)
    given = [torch.rand(48, 1, 32, 32, generator=dice) for _ in range(4)]
    given[1][0, 0, 3, 4] = 1e4  # values that a quantiser keeps apart
    known: dict[Any, torch.Tensor] = {}
    count = 0
    with serving() as (address, _):
        for on, codec in itertools.product(("cpu", OTHER, SERVED), ("raw", "lz4", "int4")):
            with EdgeClient(address, choice(on), "stem", codec=codec) as client:
                wanted = [client.infer(one, split="edge-only").output for one in given]
                for place in ("stem", "stage2.0.conv1", "stage3.0.relu"):
                    pending = [client.submit(one, split=place) for one in given]
                    for number, one in enumerate(pending):
                        answer = one.result().output
                        same(answer, known.setdefault((codec, place, number), answer))  # the first is the processor's
                        if codec != "int4":
                            same(answer, wanted[number])
                        count += 1
    return f"{count} requests of up to 3 MB, by pinned memory"


def looks() -> str:
    """Layer metrics and observers of both sides."""
    names = ["activation", "memory", "debug"]
    with serving() as (address, _), EdgeClient(address, choice(OTHER), "stage2", observers=names) as client:
        answer = client.infer(image())
        same(answer.output, client.infer(image(), split="edge-only").output)
    layers = len(answer.layers_edge) + len(answer.layers_cloud)
    seen = sum(len(one["activation"]["records"]) for one in answer.observations.values())
    failures = sum(found["failures"] for one in answer.observations.values() for found in one.values())
    if failures or not layers or not seen:
        raise AssertionError(f"{layers} layers, {seen} records, {failures} failures: {answer.observations}")
    with EdgeClient(None, choice("cpu"), "edge-only", observers=names) as client:  # the same on the processor
        known = client.infer(image()).observations

    def records(found: Any) -> dict[Any, Any]:
        rows = [row for one in found.values() for row in one["activation"]["records"]]
        return {(row["name"], row["step"], row["part"]): row["mean"] for row in rows}

    mine, theirs = records(answer.observations), records(known)
    if mine.keys() != theirs.keys() or any(abs(mine[key] - theirs[key]) > 1e-5 for key in mine):
        raise AssertionError("observers saw other values than on the processor")

    def means(on: str) -> list[float]:
        model = load_spec("digits").load_model(on)
        with Custom(lambda module, inputs, output, name: float(output.mean())).attach(model) as custom:
            model(image().to(on))
        return [record.value for record in custom.records]

    if means(OTHER) != means("cpu"):
        raise AssertionError("a function of one's own saw other values than on the processor")
    return f"{layers} layers measured, {seen} records of observers"


def profiles() -> str:
    """The server's own, by request."""
    with serving() as (address, _):
        data = fetch_profile(address, "digits", 1, 2, 3.0)
    return f"{len(data['cuts'])} cuts measured on {data['machine']['device']}"


def generation() -> str:
    """Against the whole model on the same device; with a codec against an edge on the processor."""
    spec = load_spec("examples/language_model.toml")
    words = torch.randint(3, 40, (1, 48), generator=torch.Generator().manual_seed(2))

    def generated(address: str, on: str, codec: str | None) -> torch.Tensor:
        with (
            EdgeClient(address, ModelChoice("examples/language_model.toml", device=on)) as client,
            SplitGenerator(client, "model.layers.2", answer=("least",), codec=codec) as generator,
        ):
            return torch.as_tensor(generator.generate(words.to(on), max_new_tokens=8, do_sample=False))

    with serving() as (address, _):
        wanted = spec.load_model(OTHER).generate(words.to(OTHER), max_new_tokens=8, do_sample=False)
        same(generated(address, OTHER, None), wanted)
        same(generated(address, OTHER, "int8"), generated(address, "cpu", "int8"))
    return "8 tokens, equal, without and with a codec"


def middles() -> str:
    """Three parts on three devices."""
    spec = load_spec("digits")
    edge, relay, cloud = (WrappedModel(spec.load_model(on)) for on in (OTHER, SERVED, "cpu"))
    early = through_bytes(edge.forward(image().to(OTHER), end="stage1.1"))
    between = relay.forward(early, end="stage2.1")
    same(cloud.forward(EarlyOutput.from_bytes(between.to_bytes())), edge.whole(image().to(OTHER)))
    return "a chain over two devices and the processor"


def replicas() -> str:
    """A replica on each of two devices; unloaded and loaded again."""
    both, cut = f"{SERVED},{OTHER}", "stage2.0.conv2"
    with serving(both) as (address, fleet), EdgeClient(address, choice("cpu"), cut) as client:
        wanted = client.infer(image(), split="edge-only").output
        for _ in range(6):
            same(client.infer(image()).output, wanted)
        fleet.unload("digits")
        fleet.load("digits")
        same(client.infer(image()).output, wanted)
    return "two replicas, unloaded and loaded"


class Forked(nn.Module):
    """Data decide which of two layers runs: the weights of one are of no plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.one, self.other = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.stem(x)
        out: torch.Tensor = self.one(found) if found.sum().item() > 0 else self.other(found)
        return out + found


def parts() -> str:
    """A part of each model on each of two devices: requests from all over the model, and generations."""
    from safetensors.torch import save_model

    words = torch.randint(3, 40, (1, 12), generator=torch.Generator().manual_seed(2))
    with tempfile.TemporaryDirectory() as folder:
        examples = Path("examples/language_model.toml").resolve()
        save_model(load_spec(examples).load_model(), str(Path(folder) / "llm.safetensors"))
        shutil.copy(examples.parent / "language_model.py", Path(folder) / "in_parts.py")
        text = examples.read_text().partition("\n# A model of the hub")[0].replace("language_model:", "in_parts:")
        (Path(folder) / "llm.toml").write_text(text.replace("factory =", 'weights = "llm.safetensors"\nfactory ='))
        file = Path(folder) / "server.toml"
        entries = '[models.digits]\nmodel = "digits"\nparts = ["stage2.0.conv2"]\n'
        entries += '[models.language-model]\nmodel = "llm.toml"\nparts = ["auto"]\n'
        entries += '[models.forked]\nfactory = "studies.device.service:Forked"\nweights = "forked.safetensors"\n'
        entries += 'parts = ["stem"]\n[models.forked.example]\nargs = [{shape = [2, 8]}]\n'
        forked = Forked().eval()
        save_model(forked, str(Path(folder) / "forked.safetensors"))
        file.write_text(f'device = "{SERVED},{OTHER}"\n{entries}')
        with served(file) as (address, fleet):
            held = [fleet[name].nbytes for name in ("digits", "language-model")]
            if any(len(one) != 2 or max(one.values()) > 0.9 * sum(one.values()) for one in held):
                raise AssertionError(f"the weights are not in two parts: {held}")
            count = 0
            with EdgeClient(address, choice("cpu"), "input") as client:
                for place in client.wrapped.cuts[::7]:
                    answer = client.infer(image(count), split=place.name)
                    same(answer.output, client.infer(image(count), split="edge-only").output)
                    count += 1
                two = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(3))  # planned again
                same(client.infer(two, split="stem").output, client.infer(two, split="edge-only").output)
            of_forked = ModelChoice("forked=studies.device.service:Forked", weights=Path(folder) / "forked.safetensors")
            with EdgeClient(address, of_forked, "input") as client:
                for number in range(8):
                    rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
                    same(client.infer(rows).output, forked(rows).detach())
            spec = load_spec(Path(folder) / "llm.toml")
            wanted = spec.load_model().generate(words, max_new_tokens=8, do_sample=False)
            with EdgeClient(address, ModelChoice(spec, device="cpu")) as client:
                for cut in ("model.layers.0", "model.layers.4"):
                    with SplitGenerator(client, cut, answer=("least",)) as generator:
                        same(torch.as_tensor(generator.generate(words, max_new_tokens=8, do_sample=False)), wanted)
    return f"{count + 9} requests and two texts through parts on two devices"


def memory_runs_out() -> str:
    """The request fails by name, and the next one is answered."""
    made = device.load()
    with serving() as (address, _), EdgeClient(address, choice("cpu"), "stage2.0.conv2") as client:
        wanted = client.infer(image(), split="edge-only").output
        client.infer(image())
        made.set_limit(made.memory_allocated())
        try:
            client.infer(image())
            raise AssertionError("a request was answered without memory")
        except IsthmusError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            made.set_limit(1 << 40)
        same(client.infer(image()).output, wanted)
    return said[:90]


def slow_copies() -> str:
    """Copies that take 50 ms each: a request is late by name, and the next one, with time enough, is exact."""
    made = device.load()
    with serving() as (address, _), EdgeClient(address, choice("cpu"), "stage2.0.conv2") as client:
        wanted = client.infer(image()).output.clone()
        made.set_slow(50_000)
        try:
            client.infer(image(), deadline=0.05)
            raise AssertionError("an answer in time")
        except IsthmusError as error:
            said = f"{type(error).__name__}: {error}"
            same(client.infer(image(), deadline=60).output, wanted)
        finally:
            made.set_slow(0)
        same(client.infer(image()).output, wanted)
    return said[:90]


def worker_processes() -> str:
    """Two workers, each a process that loads the device by torch's entry points for back ends; one is killed."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "isolated_device-0.dist-info"
        made.mkdir()
        (made / "METADATA").write_text("Metadata-Version: 2.1\nName: isolated-device\nVersion: 0\n")
        (made / "entry_points.txt").write_text(f"[torch.backends]\n{device.NAME} = studies.device:load\n")
        paths = os.pathsep.join([folder, str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = paths
        try:
            words = ["--workers", "2", "--worker-processes"]
            with local_server(choice(SERVED), arguments=words) as address:
                wanted = [load_spec("digits").load_model()(image(number)) for number in range(8)]
                with EdgeClient(address, choice("cpu"), "stage2.0.conv2") as client:
                    for number in range(8):
                        same(client.infer(image(number)).output, wanted[number])
                    workers = _workers()
                    os.kill(workers[0], signal.SIGKILL)
                    for number in range(8):
                        same(client.infer(image(number)).output, wanted[number])
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before
    return f"16 exact, one of {len(workers)} workers killed between them"


def _workers() -> list[int]:
    """The processes of the server that this one has started."""
    inside = [one for child in psutil.Process().children() for one in child.children()]
    found = [one.pid for one in inside if any("cloud_server" in word or "spawn" in word for word in one.cmdline())]
    if len(found) < 2:
        raise AssertionError(f"{len(found)} workers among {[one.cmdline()[:4] for one in inside]}")
    return found


CHECKS: dict[str, Callable[[], str]] = {
    "requests": requests,
    "many under way": many,
    "batches": batches,
    "staging": staging,
    "metrics and observers": looks,
    "profiles": profiles,
    "generation": generation,
    "middle parts": middles,
    "replicas, unload, load": replicas,
    "parts": parts,
    "out of memory": memory_runs_out,
    "slow copies": slow_copies,
    "worker processes": worker_processes,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CHECKS, metavar="NAME")
    parser.add_argument("--debug", action="store_true")
    options = parser.parse_args()
    device.load()
    failed = 0
    for name in options.only or CHECKS:
        try:
            said = CHECKS[name]()
            if raced := device.races():
                raise AssertionError(f"{len(raced)} races, as: {raced[0]}")
            print(f"{name}: {said}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
            if options.debug:
                traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
