"""A server with the weights of one part: its answers are the model's own, and what needs other weights is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model

from cloud_server.arguments import parser
from cloud_server.config import ModelEntry, NextServer, configure, read_config
from cloud_server.models import ServedModel
from cloud_server.models.engine import PartEnd
from edge_client import EdgeClient, ModelChoice
from edge_client.generation import SplitGenerator
from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, IsthmusError, SpecError, UnknownLayer
from shared_hooks.models import ModelSpec, load_spec
from tests.edge_client.test_chain import Deep, Station, station
from tests.shared_hooks.generation.small import make
from tests.shared_hooks.models.test_mapped import resident

CPU = torch.device("cpu")


def deep(folder: Path) -> ModelSpec:
    save_model(Deep(), str(folder / "deep.safetensors"))
    (folder / "deep.toml").write_text(
        'id = "deep"\nfactory = "tests.edge_client.test_chain:Deep"\nweights = "deep.safetensors"\n'
        "[example]\nargs = [{shape = [1, 3, 8, 8]}]\n"
    )
    return load_spec(folder / "deep.toml")


def speaker(folder: Path) -> ModelSpec:
    save_model(make("llama"), str(folder / "llama.safetensors"))
    (folder / "llama.toml").write_text(
        'id = "llama"\nfactory = "tests.shared_hooks.generation.small:make"\nweights = "llama.safetensors"\n'
        '[factory_kwargs]\nname = "llama"\n'
        '[example]\nkwargs = {input_ids = {shape = [1, 8], dtype = "int64", high = 100}}\n'
    )
    return load_spec(folder / "llama.toml")


def loaded(one: ServedModel) -> set[str]:
    assert one.only is not None
    names = {name for name, value in one.only.model.named_parameters() if one.only.weights.is_loaded(value)}
    return {name.rpartition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("only", "has"),
    [
        (("input", "one"), {"stem", "one"}),
        (("stem", "two"), {"one", "two"}),
        (("one", "three"), {"two", "three"}),
        (("two",), {"three", "head"}),
        (("input",), {"stem", "one", "two", "three", "head"}),
    ],
)
def test_the_weights_of_the_part_and_no_others(tmp_path: Path, only: tuple[str, ...], has: set[str]) -> None:
    served = ServedModel(ModelEntry(deep(tmp_path), only=only), CPU)
    assert loaded(served) == has
    assert served.nbytes == sum(one.nbytes for name, one in Deep().named_parameters() if name.split(".")[0] in has)
    whole = ServedModel(ModelEntry(deep(tmp_path)), CPU)
    assert served.identity.weights_hash == whole.identity.weights_hash, "both sides still agree on all weights"
    assert served.identity.plan_digest == whole.identity.plan_digest


class Parts:
    """A chain whose servers have the weights of their own parts."""

    def __init__(self, spec: ModelSpec, first: str, second: str) -> None:
        self.last = station(spec, only=(second,))
        self.spec, self.first, self.second = spec, first, second

    def __enter__(self) -> Station:
        self.middle = station(
            self.spec, NextServer("next", (self.last.__enter__().address,)), only=(self.first, self.second)
        )
        return self.middle.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.middle.__exit__(*error)
        self.last.__exit__(*error)


def test_a_chain_of_parts_gives_the_models_own_answer(tmp_path: Path) -> None:
    spec, image = deep(tmp_path), torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        whole = Deep().eval()(image)
    with Parts(spec, "stem", "two") as gateway, EdgeClient([gateway.address, "next"], spec) as client:
        with EdgeClient([gateway.address, "next"], ModelChoice(spec, only_head="stem"), ["stem", "two"]) as head:
            assert torch.equal(head.infer(image).output["logits"], whole["logits"])
        for split in (["stem", "two"], ["one", "two"]):
            assert torch.equal(client.infer(image, split=split).output["logits"], whole["logits"]), split
        for split, says in (
            (
                ["input", "two"],
                "only the weights from stem up to two are loaded here, and this part begins after input",
            ),
            (["stem", "three"], "this part ends after three"),
            (["one", "one"], "this part begins after one"),
        ):
            with pytest.raises(IsthmusError, match=says):
                client.infer(image, split=split)
    with Parts(spec, "stem", "two") as gateway, EdgeClient(gateway.address, spec, "stem") as client:
        with pytest.raises(CutRefused, match="this part runs to the end"):
            client.infer(image)
        with pytest.raises(CutRefused, match="this part begins after input"):
            client.infer(image, split="input")


def test_weights_that_learning_of_batches_reads_are_given_back(tmp_path: Path) -> None:
    spec = deep(tmp_path)
    file = tmp_path / "deep.safetensors"
    served = ServedModel(ModelEntry(spec, only=("stem", "two")), CPU)
    wrapped = WrappedModel(spec.load_model())
    crossing = wrapped.head("stem", torch.randn(1, 3, 8, 8)).crossing
    assert resident(file) == 0
    assert served.batching.learn(crossing, PartEnd("two")) and served.batching.batch_key(crossing, PartEnd("two"))
    assert resident(file) == 0
    assert served.only is not None
    served.only.model(torch.randn(1, 3, 8, 8))
    assert resident(file) > 0, "what the whole model reads stays"


def test_generation_by_parts(tmp_path: Path) -> None:
    spec = speaker(tmp_path)
    ids = torch.randint(5, 100, (1, 6))
    asked: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    whole = spec.load_model().generate(**asked, do_sample=False)  # type: ignore[operator]
    cuts = ["model.layers.0", "model.layers.2"]
    with Parts(spec, *cuts) as gateway, EdgeClient([gateway.address, "next"], spec) as client:
        assert torch.equal(SplitGenerator(client, cuts).generate(**asked, do_sample=False), whole)
        assert torch.equal(
            SplitGenerator(client, ["model.layers.1", "model.layers.2"]).generate(**asked, do_sample=False), whole
        )
        with pytest.raises(CutRefused, match=r"this part ends after model\.layers\.3"):
            SplitGenerator(client, ["model.layers.0", "model.layers.3"]).generate(**asked, do_sample=False)


def test_unknown_part_is_refused(tmp_path: Path) -> None:
    spec = deep(tmp_path)
    for only, error, says in (
        (("two", "stem"), CutRefused, "stem does not come after two"),
        (("stem", "stem"), CutRefused, "stem does not come after stem"),
        (("stam",), UnknownLayer, "stem"),
        (("stem", "thre"), UnknownLayer, "three"),
    ):
        with pytest.raises(error, match=says):
            ServedModel(ModelEntry(spec, only=only), CPU)
    path = tmp_path / "deep.toml"
    text = path.read_text()
    for without, says in ((("weights",), "no file to leave them in"), (("[example", "args"), "needs an example input")):
        path.write_text("\n".join(line for line in text.splitlines() if not line.startswith(without)) + "\n")
        with pytest.raises(SpecError, match=says):
            ServedModel(ModelEntry(load_spec(path), only=("stem",)), CPU)
    with pytest.raises(SpecError, match="only"):
        ModelEntry(spec, only=("a", "b", "c"))
    with pytest.raises(SpecError, match="tails: needs all of a model"):
        ModelEntry(spec, only=("stem",), tails=("all",))


def test_options_and_configuration(tmp_path: Path) -> None:
    deep(tmp_path)
    model = ["--model", str(tmp_path / "deep.toml")]
    for words, only in (
        (["--only-middle", "stem,two"], ("stem", "two")),
        (["--only-middle", "deep=stem, two"], ("stem", "two")),
        (["--only-tail", "two"], ("two",)),
        ([], ()),
    ):
        assert configure(parser().parse_args([*model, *words])).models[0].only == only
    for words, says in (
        (["--only-middle", "stem"], "the cuts where a part begins and ends"),
        (["--only-tail", "a,b"], "the cut where the tail begins"),
        (["--only-tail", "a", "--only-middle", "a,b"], "has one part"),
        (["--only-tail", "other=a"], 'no model "other"'),
    ):
        with pytest.raises(SpecError, match=says):
            configure(parser().parse_args([*model, *words]))
    (tmp_path / "server.toml").write_text('[models.deep]\nmodel = "deep.toml"\nonly = ["stem", "two"]\n')
    assert read_config(tmp_path / "server.toml").models[0].only == ("stem", "two")


def test_a_part_that_changed_in_memory_is_put_right_and_stays_a_part(tmp_path: Path) -> None:
    served = ServedModel(ModelEntry(deep(tmp_path), only=("stem", "two")), CPU)
    assert served.only is not None
    with torch.no_grad():
        served.only.model.get_submodule("one").weight += 1  # type: ignore[operator, union-attr]
    assert served._guard.mend() and served._guard.mended == 1
    expected = Deep().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in served.only.model.state_dict().items())


def test_other_files_of_a_folder_are_not_the_models(tmp_path: Path) -> None:
    """As from_pretrained reads it: by the index, or model.safetensors; none of a quantised one."""
    folder = tmp_path / "folder"
    make("llama").save_pretrained(folder)
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    path = tmp_path / "m.toml"
    text = 'id = "m"\nfactory = "transformers:AutoModelForCausalLM.from_pretrained"\n[factory_kwargs]\n'
    path.write_text(text + 'pretrained_model_name_or_path = "./folder"\n')
    model, weights = load_spec(path).load_mapped()
    assert weights.total == sum(one.nbytes for one in model.parameters())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(SpecError, match="no file to leave them in"):
        load_spec(path).load_mapped()
    path.write_text(text + 'pretrained_model_name_or_path = "./folder"\nrevision = "main"\n')
    with pytest.raises(SpecError, match="no file to leave them in"):
        load_spec(path).load_mapped()


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_transformers_is_left_in_its_files(tmp_path: Path, kind: str, dtype: str) -> None:
    """As the documented recipe has it, in several files; the model is the one that from_pretrained gives."""
    made = make("llama").to(getattr(torch, dtype))
    made.generation_config.update(do_sample=True, top_k=7)
    made.save_pretrained(tmp_path / "folder", max_shard_size="40KB")
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) >= 2
    (tmp_path / "m.toml").write_text(
        f'id = "m"\nfactory = "transformers:{kind}.from_pretrained"\ndtype = "{dtype}"\n'
        '[factory_kwargs]\npretrained_model_name_or_path = "./folder"\n'
        '[example]\nkwargs = {input_ids = {shape = [1, 8], dtype = "int64", high = 100}}\n'
        "[call_kwargs]\nuse_cache = false\n"
    )
    spec = load_spec(tmp_path / "m.toml")
    whole = ServedModel(ModelEntry(spec), CPU)
    part = ServedModel(ModelEntry(spec, only=("model.layers.0", "model.layers.2")), CPU)
    for name in ("weights_hash", "structure_digest", "plan_digest", "environment"):
        assert getattr(part.identity, name) == getattr(whole.identity, name)
    assert {name.partition("layers.")[2][:1] for name in loaded(part)} == {"1", "2"}
    assert part.only is not None and part.only.model.generation_config.top_k == 7  # type: ignore[union-attr]
    ids = torch.randint(5, 100, (1, 6))
    asked: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    expected = spec.load_model().generate(**asked, do_sample=False)  # type: ignore[operator]
    cuts = ["model.layers.0", "model.layers.2"]
    with (
        Parts(spec, *cuts) as gateway,
        EdgeClient([gateway.address, "next"], ModelChoice(spec, only_head=cuts[0], device="cpu"), cuts) as client,
    ):
        assert torch.equal(SplitGenerator(client, cuts).generate(**asked, do_sample=False), expected)
