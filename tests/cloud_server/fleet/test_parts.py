"""A model with a part on each device: its answers are the whole model's, and several requests are under way in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cloud_server import Core
from cloud_server.arguments import parser
from cloud_server.chain import Chain
from cloud_server.config import AUTO, ModelEntry, NextServer, ServerConfig, configure, read_config
from cloud_server.fleet import Fleet, ThisProcess, hosts
from cloud_server.fleet.on_devices import Parted
from cloud_server.models import Engine, ServedModel
from cloud_server.models.engine import PartEnd
from cloud_server.transport import CloudServer
from edge_client import EdgeClient
from edge_client.generation import SplitGenerator
from shared_hooks import WrappedModel, devices
from shared_hooks.errors import CutRefused, Disagreement, SessionLost, SpecError
from shared_hooks.lifecycle import Event, Lifecycle
from shared_hooks.models import ModelSpec, load_spec
from shared_hooks.planning.part import _Bringing
from tests.cloud_server.models.test_only_part import deep, loaded, speaker
from tests.edge_client.test_chain import CUTS, Deep, station
from tests.edge_client.test_processes import CloudProcess, cloud
from tests.starts import workers_of
from tests.waiting import PATIENCE

CPU = torch.device("cpu")
BLOCKS = [f"model.layers.{number}" for number in range(4)]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, ModelSpec]:
    folder = tmp_path_factory.mktemp("parts")
    return deep(folder), speaker(folder)


@pytest.fixture(scope="module", params=["in one process", "in workers"])
def server(request: pytest.FixtureRequest, specs: tuple[ModelSpec, ModelSpec]) -> Iterator[CloudProcess]:
    words = [word for spec in specs for word in ("--model", spec.origin)]
    words += ["--device", "cpu,cpu,cpu", "--parts", "deep=stem,two", "--parts", "llama=auto"]
    with cloud(*words, *(["--worker-processes"] if request.param == "in workers" else [])) as process:
        yield process


def image(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def whole(inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        found: dict[str, torch.Tensor] = Deep().eval()(inputs)
    return found


def same(mine: Any, theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(mine[name], value) for name, value in theirs.items())


def asked(seed: int = 0, rows: int = 1) -> dict[str, Any]:
    ids = torch.randint(5, 100, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}


def entered(spec: ModelSpec, *cuts: str) -> list[ServedModel]:
    entry = ModelEntry(spec, parts=cuts)
    return [ServedModel(one.entry, one.device) for one in hosts.placed(entry, ",".join(["cpu"] * (len(cuts) + 1)))]


def test_every_cut_is_answered_as_by_the_whole(server: CloudProcess, specs: tuple[ModelSpec, ModelSpec]) -> None:
    behind = {"input": ["stem", "two"], "stem": ["two"], "one": ["two"], "two": [], "relu": [], "three": []}
    with EdgeClient(server.address, specs[0]) as client:
        for seed, cut in enumerate(CUTS * 2):
            answer = client.infer(image(seed), split=cut)
            assert same(answer.output, whole(image(seed))), cut
            assert [part.split for part in answer.parts] == behind[cut]
            names = [layer.name for layer in answer.layers_cloud]
            assert names == [name for name in ("stem", "one", "two", "relu", "three", "head") if name in names]
            assert names[-1] == "head" and len(names) == len(CUTS) - CUTS.index(cut)
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda seed: client.infer(image(seed), split=CUTS[seed % 6]), range(48))
            assert all(same(one.output, whole(image(seed))) for seed, one in enumerate(answers))
        other = torch.randn(3, 3, 9, 7)  # of another form than the example
        assert same(client.infer(other, split="stem").output, whole(other))


def test_a_file_is_read_by_the_first_part(
    server: CloudProcess, specs: tuple[ModelSpec, ModelSpec], tmp_path: Path
) -> None:
    save_file({"image": image(7)}, str(tmp_path / "image.safetensors"))
    with EdgeClient(server.address, specs[0], "cloud-only-file") as client:
        answer = client.infer(tmp_path / "image.safetensors")
        assert same(answer.output, whole(image(7))) and [part.split for part in answer.parts] == ["stem", "two"]


class Called(nn.Module):
    """Its inputs are called what our own arguments are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, start: torch.Tensor, end: torch.Tensor | None = None) -> torch.Tensor:
        found = self.one(start) if end is None else self.one(start) * end
        out: torch.Tensor = self.two(found)
        return out


@pytest.mark.parametrize("parts", [(), ("one",)])
def test_inputs_of_a_file_may_have_any_name(tmp_path: Path, parts: tuple[str, ...]) -> None:
    save_model(Called(), str(tmp_path / "called.safetensors"))
    (tmp_path / "called.toml").write_text(
        f'id = "called"\nfactory = "{__name__}:Called"\nweights = "called.safetensors"\n'
        "[example]\nargs = [{shape = [1, 4]}]\nkwargs = {end = {shape = [1, 4]}}\n"
    )
    spec, given = load_spec(tmp_path / "called.toml"), {"start": torch.randn(1, 4), "end": torch.randn(1, 4)}
    save_file(given, str(tmp_path / "given.safetensors"))
    with torch.no_grad():
        expected = Called().eval()(**given)
    config = ServerConfig(models=(ModelEntry(spec, parts=parts),), device=",".join(["cpu"] * (1 + len(parts))))
    server = CloudServer(Core(Fleet(ThisProcess(config), config.models, tuple), config.limits, 2), "127.0.0.1:0")
    server.start()
    try:
        with EdgeClient(f"127.0.0.1:{server.port}", spec, "cloud-only-file") as client:
            assert torch.equal(client.infer(tmp_path / "given.safetensors").output, expected)
    finally:
        server.stop(grace=1)


def test_generation_is_token_for_token(server: CloudProcess, specs: tuple[ModelSpec, ModelSpec]) -> None:
    model = specs[1].load_model()
    with EdgeClient(server.address, specs[1]) as client:
        for seed, cut in enumerate(BLOCKS[:3]):
            for more in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}, {"prompt_lookup_num_tokens": 3}):
                given = {**asked(seed), **more}
                torch.manual_seed(seed)
                expected = model.generate(**given)  # type: ignore[operator]
                torch.manual_seed(seed)
                assert torch.equal(SplitGenerator(client, cut).generate(**given), expected), (cut, more)

    def one(seed: int) -> bool:
        with EdgeClient(server.address, specs[1]) as client:
            found = SplitGenerator(client, BLOCKS[seed % 3]).generate(**asked(seed))
        return torch.equal(found, model.generate(**asked(seed)))  # type: ignore[operator]

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(one, range(6)))


def test_a_part_whose_process_ends_is_given_its_session_again(specs: tuple[ModelSpec, ModelSpec]) -> None:
    """Any part's: the first's by the client, another's by the part before it."""
    model, words = specs[1].load_model(), ["--device", "cpu,cpu", "--parts", BLOCKS[1], "--worker-processes"]
    with cloud("--model", specs[1].origin, *words) as server, EdgeClient(server.address, specs[1]) as client:
        workers = workers_of(server.process_id)
        assert len(workers) == 2

        def killing(victim: psutil.Process) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
            def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                if ids.shape[1] == 9:
                    victim.kill()
                    victim.wait(30)
                return scores

            return look

        for seed, victim in enumerate(workers):
            found = SplitGenerator(client, BLOCKS[0]).generate(**asked(seed), logits_processor=[killing(victim)])
            assert torch.equal(found, model.generate(**asked(seed)))  # type: ignore[operator]


def test_each_device_has_the_weights_of_its_part(specs: tuple[ModelSpec, ModelSpec]) -> None:
    parts = entered(specs[0], "stem", "two")
    assert [loaded(one) for one in parts] == [{"stem"}, {"one", "two"}, {"three", "head"}]
    assert [one.identity.part for one in parts] == [
        ("input", "stem"),
        ("stem", "one", "two"),
        ("two", "relu", "three", "head"),
    ]
    shared = entered(specs[1], AUTO)
    assert len(shared) == 2
    blocks = [{name.partition("layers.")[2][:1] for name in loaded(one)} - {""} for one in shared]
    assert blocks[0] | blocks[1] == {"0", "1", "2", "3"} and not blocks[0] & blocks[1]
    total = shared[0].only.weights.total  # type: ignore[union-attr]
    assert max(one.nbytes for one in shared) < 0.75 * total


def test_several_requests_are_under_way_one_in_each_part(specs: tuple[ModelSpec, ModelSpec]) -> None:
    """While one is held in the first part, one that begins in the second is answered, and the other way round."""
    spec, entry = specs[0], ModelEntry(specs[0], parts=("stem",))
    lifecycle, held, opened = Lifecycle("cloud"), threading.Event(), threading.Event()

    class Gate:
        def before_tail(self, event: Event) -> None:
            if event.split == "input":
                held.set()
                assert opened.wait(PATIENCE)

    lifecycle.register(Gate())
    config = ServerConfig(models=(entry,), device="cpu,cpu", lifecycle=lifecycle)
    fleet = Fleet(ThisProcess(config), config.models, lambda: config.models)
    server = CloudServer(Core(fleet, config.limits, 2, (), lifecycle), "127.0.0.1:0")
    server.start()
    try:
        assert isinstance(fleet["deep"]._engine(), Parted)
        with EdgeClient(f"127.0.0.1:{server.port}", spec) as client:
            waiting = client.submit(image(1), split="input")
            assert held.wait(PATIENCE)
            assert same(client.infer(image(2), split="one").output, whole(image(2)))
            opened.set()
            assert same(waiting.result().output, whole(image(1)))
    finally:
        opened.set()
        server.stop(grace=1)


def test_a_gateway_of_parts_hands_on_to_the_next_server(specs: tuple[ModelSpec, ModelSpec]) -> None:
    """Parts of one server as a middle part of a chain: requests, and generations."""
    for spec, parts, cuts in ((specs[0], ("one",), ["stem", "two"]), (specs[1], (BLOCKS[1],), [BLOCKS[0], BLOCKS[2]])):
        entry = ModelEntry(spec, parts=parts)
        config = ServerConfig(models=(entry,), device="cpu,cpu")
        with station(spec) as last:
            fleet = Fleet(ThisProcess(config), config.models, tuple)
            chain = Chain([NextServer("next", (last.address,))], config.limits)
            server = CloudServer(Core(fleet, config.limits, 2, (), config.lifecycle, chain), "127.0.0.1:0")
            server.start()
            try:
                with EdgeClient([f"127.0.0.1:{server.port}", "next"], spec, cuts) as client:
                    if spec is specs[0]:
                        answer = client.infer(image(3))
                        assert same(answer.output, whole(image(3)))
                        assert [(one.server, one.split) for one in answer.parts] == [("part 2", "one"), ("next", "two")]
                    else:
                        expected = spec.load_model().generate(**asked(5))  # type: ignore[operator]
                        assert torch.equal(SplitGenerator(client, cuts).generate(**asked(5)), expected)
            finally:
                server.stop(grace=1)


def test_a_part_that_loses_a_session_is_given_it_again(specs: tuple[ModelSpec, ModelSpec]) -> None:
    model, parts = specs[1].load_model(), entered(specs[1], BLOCKS[1])
    lost: list[str] = []

    class Losing:
        """The second part, which loses every session after its third step, once."""

        def __getattr__(self, name: str) -> Any:
            return getattr(parts[1], name)

        def open_session(self, cut: str, following: Any = None) -> Any:
            session = parts[1].open_session(cut, following)
            steps, step = 0, session.step

            def counted(header: bytes, payload: memoryview) -> Any:
                nonlocal steps
                steps += 1
                if steps == 4 and len(lost) < 2:
                    lost.append(cut)
                    raise SessionLost("on purpose")
                return step(header, payload)

            session.step = counted  # type: ignore[method-assign]
            return session

    both: list[Engine] = [parts[0], Losing()]  # type: ignore[list-item]
    with Core([Parted(both)], ServerConfig().limits, workers=1) as core:
        server = CloudServer(core, "127.0.0.1:0")
        server.start()
        try:
            with EdgeClient(f"127.0.0.1:{server.port}", specs[1]) as client:
                found = SplitGenerator(client, BLOCKS[0]).generate(**asked(2))
                assert torch.equal(found, model.generate(**asked(2))) and lost  # type: ignore[operator]
        finally:
            server.stop(grace=1)


def test_parts_must_be_of_one_model_and_follow_each_other(specs: tuple[ModelSpec, ModelSpec]) -> None:
    first, second, third = entered(specs[0], "stem", "two")
    with pytest.raises(Disagreement, match="a part ends at stem, the next begins at two"):
        Parted([first, third])
    other = entered(specs[1], BLOCKS[1])[1]
    with pytest.raises(Disagreement, match="is not the same on each device"):
        Parted([first, other])
    engine = Parted([first, second, third])
    assert engine.cuts == ("stem", "two") and engine.identity.is_like(ServedModel(ModelEntry(specs[0]), CPU).identity)
    with pytest.raises(CutRefused, match=r"in 3 parts, cut after stem, two, and its example has no cut \"nope\""):
        engine.open_session("nope")
    early = WrappedModel(specs[0].load_model()).head("one", image(4))
    parcel = early.pack()
    payload = memoryview(bytearray().join(parcel.buffers))
    part = engine.compute(early.crossing, parcel.header, payload, False, PartEnd("relu"))
    assert part.cut is not None and [one.cut for one in part.reply.parts] == ["two"], "up to a later cut, beyond a part"


def test_invalid_parts_are_refused(specs: tuple[ModelSpec, ModelSpec], tmp_path: Path) -> None:
    entry = ModelEntry(specs[0], parts=("stem", "two"))
    with pytest.raises(SpecError, match="parts: stem, two makes 3 parts, one for each device; device has 2: cpu,cpu"):
        hosts.placed(entry, "cpu,cpu")
    with pytest.raises(SpecError, match="parts: auto makes 2 parts at least, one for each device; device has 1: auto"):
        hosts.placed(ModelEntry(specs[0], parts=(AUTO,)), "auto")
    with pytest.raises(SpecError, match="either each device has a part"):
        ModelEntry(specs[0], parts=("stem",), only=("two",))
    with pytest.raises(SpecError, match="compile: needs all of a model's weights"):
        ModelEntry(specs[0], parts=("stem",), compile="bitwise")
    for wrong in (("",), (AUTO, "stem")):
        with pytest.raises(SpecError, match="expected the cuts between the devices"):
            ModelEntry(specs[0], parts=wrong)
    with pytest.raises(CutRefused, match="no 9 parts of about equal weights"):
        ServedModel(ModelEntry(specs[0]).piece(0, 9), CPU)
    model = ["--model", specs[0].origin]
    assert configure(parser().parse_args([*model, "--parts", "stem, two"])).models[0].parts == ("stem", "two")
    (tmp_path / "server.toml").write_text(f'[models.deep]\nmodel = "{specs[0].origin}"\nparts = ["auto"]\n')
    assert read_config(tmp_path / "server.toml").models[0].parts == (AUTO,)


def test_a_model_too_large_for_one_device_is_put_on_all(
    specs: tuple[ModelSpec, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--device auto` on a machine with three accelerators."""
    monkeypatch.setattr(hosts, "pick_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(hosts, "kind", lambda device: {"kind": device.type})
    monkeypatch.setattr(devices, "count", lambda kind: 3)
    nbytes, entry = specs[0].weights_bytes(), ModelEntry(specs[0])
    for free, there in ((None, 1), (2 * nbytes, 1), (nbytes, 3)):
        monkeypatch.setattr(devices, "free", lambda device, free=free: free)
        found = hosts.placed(entry, "auto")
        assert [str(one.device) for one in found] == [f"cuda:{number}" for number in range(there)]
        assert [one.part for one in found] == ([None] if there == 1 else [(number, 3) for number in range(3)])
    assert len(hosts.placed(ModelEntry(specs[0], parts=("stem",)), "auto")) == 2
    assert len(hosts.placed(entry, "cuda:0")) == 1, "one that is named is taken"
    assert len(hosts.placed(entry, "auto", divided=True)) == 1, "tensor parallelism divides it otherwise"


def test_weights_of_other_parts_are_brought_to_the_device(specs: tuple[ModelSpec, ModelSpec]) -> None:
    """With the device without memory in an accelerator's place: what runs there finds weights of the processor's."""
    meta = torch.device("meta")
    x, weight, bias = torch.empty(2, 4, device=meta), torch.ones(3, 4), torch.ones(3)
    with pytest.raises(RuntimeError, match="device"):
        torch.nn.functional.linear(x, weight, bias)
    with _Bringing(meta):
        found = torch.nn.functional.linear(x, weight, bias)
        assert found.device == meta and found.shape == (2, 3)
        assert torch.nn.functional.linear(torch.ones(2, 4), weight, bias).device == CPU, "nothing of the device's in it"
        assert torch.embedding(weight, torch.empty(2, dtype=torch.long, device=meta)).device == meta
    seen: list[tuple[str, str]] = []

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func.__name__, args[0].device.type))
            return args[0] if func.__name__.startswith(("add_", "copy_")) else func(*args, **(kwargs or {}))

    there = torch.empty(3, 4, device=meta)
    with Below(), _Bringing(meta):  # type: ignore[no-untyped-call]
        weight.add_(there), weight.copy_(there), weight.add(there)
    writes = [one for one in seen if one[0].startswith("add")] + [one for one in seen if one[0] == "copy_.default"]
    assert writes == [("add_.Tensor", "cpu"), ("add.Tensor", "meta"), ("copy_.default", "cpu")], "none to a copy"
    model = specs[0].load_mapped()[0]
    with torch.no_grad(), _Bringing(meta):
        assert model(torch.empty(1, 3, 8, 8, device=meta))["logits"].device == meta
