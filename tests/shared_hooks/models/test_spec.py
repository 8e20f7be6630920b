"""The format of docs/model-spec.md: what it can say, and what it answers to mistakes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file, save_model
from torch import nn

from shared_hooks.errors import SpecError, UnknownModel
from shared_hooks.models import ModelSpec, Prediction, load_spec
from shared_hooks.modules import weights_hash

Write = Callable[[str], ModelSpec]
BASE = 'id = "m"\nfactory = "net:linear"\n'


def test_least(write_spec: Write) -> None:
    spec = write_spec(BASE)
    assert spec.model_id == "m" and spec.labels == () and spec.example() is None
    first, second = spec.load_model(), spec.load_model()
    assert first is not second and torch.equal(first.weight, second.weight)


def test_the_global_random_state_is_left_alone(write_spec: Write) -> None:
    before = torch.random.get_rng_state()
    write_spec(BASE + "[[example.args]]\nshape = [1, 4]").load_model()
    assert torch.equal(before, torch.random.get_rng_state())


def test_paths_of_a_factory_are_found_from_the_spec(write_spec: Write) -> None:
    spec = write_spec(BASE + '[factory_kwargs]\na = "./x"\nb = ["../y", "z"]\nc = "x"\nd = ".z"\n')
    folder = str(spec.folder)
    expected = {"a": f"{folder}/x", "b": [f"{folder.rpartition('/')[0]}/y", "z"], "c": "x", "d": ".z"}
    assert spec.factory_kwargs == expected
    (spec.folder / "x").mkdir()
    with pytest.raises(SpecError, match='"x" beside the spec is written "./x"'):
        spec.load_model()


def test_factory_kwargs_seed_and_dtype(write_spec: Write) -> None:
    spec = write_spec(BASE + 'seed = 5\ndtype = "bfloat16"\n[factory_kwargs]\nfeatures = 9')
    model = spec.load_model()
    assert model.weight.shape == (3, 9) and model.weight.dtype == torch.bfloat16
    assert not torch.equal(model.weight, write_spec(BASE + "[factory_kwargs]\nfeatures = 9").load_model().weight)


def test_example_of_tensors(write_spec: Write) -> None:
    spec = write_spec(
        BASE
        + """
        [call_kwargs]
        scale = 2.0
        [example]
        seed = 3
        [[example.args]]
        shape = [2, 4]
        dtype = "float16"
        [example.kwargs.ids]
        shape = [1, 5]
        dtype = "int64"
        low = 3
        high = 6
        [example.kwargs.mask]
        shape = [1, 5]
        dtype = "bool"
        fill = 1
        """
    )
    found = spec.example("cpu")
    assert found is not None
    (x,), kwargs = found
    assert x.shape == (2, 4) and x.dtype == torch.float16
    assert kwargs["ids"].min() >= 3 and kwargs["ids"].max() < 6
    assert kwargs["mask"].all() and kwargs["mask"].dtype == torch.bool
    assert kwargs["scale"] == 2.0


def test_example_from_code_and_from_files(write_spec: Write, tmp_path: Path) -> None:
    save_file({"ids": torch.ones(1, 3), "mask": torch.zeros(1, 3)}, tmp_path / "two.safetensors")
    from_code = write_spec('example = "net:example"\n' + BASE).example()
    from_file = write_spec('example = "two.safetensors"\n' + BASE).example()
    assert from_code is not None and from_code[1]["input"].shape == (1, 4)
    assert from_file is not None and from_file[1].keys() == {"ids", "mask"}


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ('size = [6, 4], mode = "L"', (1, 1, 6, 4)),
        ('size = [6, 4], layout = "NHWC", dtype = "float64"', (1, 6, 4, 3)),
        ('mode = "L"', None),  # the image's own
    ],
)
@pytest.mark.parametrize("keyword", ["", "pixels"])
def test_without_an_example_it_is_what_images_become(
    write_spec: Write, options: str, shape: tuple[int, ...] | None, keyword: str
) -> None:
    named = f', keyword = "{keyword}"' if keyword else ""
    spec = write_spec(f"{BASE}preprocess = {{{options}{named}}}")
    if shape is None:
        assert spec.example() is None
        return
    args, kwargs = spec.example()  # type: ignore[misc]
    (made,) = (*args, *kwargs.values())
    assert list(kwargs) == ([keyword] if keyword else [])
    picture = Image.new("L", (9, 9), 7)
    args, kwargs = spec.preprocess_picture(picture)
    (real,) = (*args, *kwargs.values())
    assert made.shape == real.shape == shape and made.dtype == real.dtype and made.stride() == real.stride()


def test_own_preprocess_and_postprocess(write_spec: Write, tmp_path: Path) -> None:
    spec = write_spec(BASE + 'preprocess = "net:wave"\npostprocess = "net:name_it"')
    (tensor,), _ = spec.preprocess(tmp_path / "2.wav")
    assert tensor.tolist() == [[2.0] * 4]
    assert spec.postprocess(tensor) == [Prediction("it", 0, 8.0)]


def test_weights_are_strict(write_spec: Write, tmp_path: Path) -> None:
    good = {"weight": torch.ones(3, 4), "bias": torch.zeros(3)}
    spec = write_spec(BASE + 'weights = "w.safetensors"')
    save_file(good, tmp_path / "w.safetensors")
    assert torch.equal(spec.load_model().weight, good["weight"])
    for change, message in {
        "missing": r"1 of the model's tensors missing \(bias\)",
        "more": r"1 tensors that the model does not have \(wieght\)\. Did you mean weight",
        "shape": r"weight has shape \(3, 5\), the model's has \(3, 4\)",
        "dtype": r"weight is float64, the model's is float32",
    }.items():
        bad = dict(good)
        if change == "missing":
            del bad["bias"]
        if change == "more":
            bad["wieght"] = torch.ones(1)
        if change == "shape":
            bad["weight"] = torch.ones(3, 5)
        if change == "dtype":
            bad["weight"] = torch.ones(3, 4, dtype=torch.float64)
        save_file(bad, tmp_path / "w.safetensors")
        with pytest.raises(SpecError, match=message):
            spec.load_model()
    save_file({"weight": good["weight"].bfloat16(), "bias": good["bias"]}, tmp_path / "w.safetensors")
    assert torch.equal(spec.load_model().weight, good["weight"])
    (tmp_path / "w.safetensors").write_bytes(b"PK\x03\x04 no")
    with pytest.raises(SpecError, match=r"w\.safetensors is not a safetensors file"):
        spec.load_model()
    (tmp_path / "w.safetensors").unlink()
    with pytest.raises(SpecError, match=r"no such weights file: .*w\.safetensors"):
        spec.load_model()


def test_tied_weights_and_several_files(write_spec: Write, tmp_path: Path) -> None:
    spec = write_spec('id = "t"\nfactory = "net:Tied"\nweights = "t.safetensors"')
    model = write_spec('id = "t"\nfactory = "net:Tied"\nseed = 9').load_model()
    save_model(model, str(tmp_path / "t.safetensors"))
    loaded = spec.load_model()
    assert torch.equal(loaded.head.weight, model.head.weight) and loaded.head.weight is loaded.embed.weight
    save_file({"weight": torch.ones(3, 4)}, tmp_path / "a.safetensors")
    save_file({"bias": torch.ones(3)}, tmp_path / "b.safetensors")
    assert write_spec(BASE + 'weights = ["a.safetensors", "b.safetensors"]').load_model().bias.sum() == 3
    with pytest.raises(SpecError, match="bias is in more than one weights file"):
        write_spec(BASE + 'weights = ["b.safetensors", "b.safetensors"]').load_model()


def test_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_spec("digits").model_id == "digits"
    assert load_spec("mine=digits").model_id == "mine"
    spec = load_spec("relu=torch.nn:ReLU")
    assert spec.model_id == "relu" and isinstance(spec.load_model(), nn.ReLU) and spec.example() is None
    assert load_spec("torch.nn:Identity").model_id == "Identity"
    (tmp_path / "isthmus_in_cwd.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(2, 2)\n")
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "w.safetensors")
    monkeypatch.chdir(tmp_path)
    assert load_spec("isthmus_in_cwd:build", weights="w.safetensors").load_model().weight.sum() == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"spec\.toml: id: missing; expected a string"),
        ('id = "m"\nfactry = "net:linear"', r'factory: missing; expected "module:callable" \(there is "factry"'),
        ("id = 3", r"id: expected a string, found an integer \(3\)"),
        ('id = "a b"\nfactory = "net:linear"', r'id: expected up to 128 letters.*found "a b"'),
        ('id = "m"\nfactory = "linear"', r'factory: expected "module:callable", found "linear"'),
        (BASE + 'wieghts = "w.safetensors"', r"wieghts: unknown key at the top; .*Did you mean weights"),
        (BASE + 'weights = "w.pt"', r"weights: expected a safetensors file.*can run code"),
        (BASE + 'dtype = "flaot16"', r'dtype: "flaot16" is not one of .*Did you mean .*float16'),
        (BASE + "labels = [1, 2]", r"labels: expected a list of strings"),
        (BASE + 'labels = "none.txt"', r"labels: .*none\.txt cannot be read: No such file"),
        (BASE + "[preprocess]\nsize = [0, 3]", r"preprocess\.size: expected an integer or \[height, width\]"),
        (BASE + "[preprocess]\nmean = [1, 2]", r"preprocess\.mean: expected 1 or 3 numbers for mode RGB, found 2"),
        (BASE + "[preprocess]\nstd = [0]", r"preprocess\.std: must not be 0"),
        (BASE + "[preprocess]\nsiez = 3", r"preprocess\.siez: unknown key in \[preprocess\]; .*Did you mean size"),
        (BASE + "[preprocess]\nsize = 8\nshorter_side = 4", r"preprocess\.shorter_side: needs size"),
        (BASE + 'preprocess = "resize"', r'preprocess: expected a table or "module:callable", found "resize"'),
        (BASE + "[postprocess]\ntop_k = 0", r"postprocess\.top_k: expected an integer of at least 1"),
        (BASE + "[postprocess]\noutput = true", r"postprocess\.output: expected the name or position"),
        (BASE + "[example]", r"example: describes no tensor"),
        (BASE + "[[example.args]]\nshape = [1, -1]", r"example\.args\[0\]\.shape: expected sizes of at least 0"),
        (BASE + "[[example.args]]\ndtype = 'int8'", r"example\.args\[0\]\.shape: missing"),
        (BASE + "[[example.args]]\nshape = [1]\ndtype = 'int8'", r"example\.args\[0\]\.high: missing; integers"),
        (BASE + "[example.kwargs]\nx = 1", r"example\.kwargs\.x: expected a table.*\[call_kwargs\]"),
        (BASE + "example = 'none.npy'", r"example: no such file: .*none\.npy"),
        (BASE + "= 3", r"spec\.toml: not valid TOML"),
    ],
)
def test_mistakes_in_the_file(write_spec: Write, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        write_spec(text)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("net:lineer", r'factory: "isthmus_net_\d+" has no "lineer"\. Did you mean .*linear'),
        ("net:number", r'factory: "isthmus_net_\d+:number" is int, not something to call'),
        ("net:broken", r'factory: "isthmus_net_\d+:broken" raised ValueError: no such luck'),
        ("net:model", r"is a model already; expected a function or a class"),
        ("net:torch.ones", r"raised TypeError"),
        ("isthmus_nowhere:x", r'factory: cannot import "isthmus_nowhere".*not installed, and not in'),
        ("builtins:dict", r'factory: "builtins:dict" returned dict; expected a torch.nn.Module'),
    ],
)
def test_mistakes_in_the_factory(write_spec: Write, factory: str, message: str) -> None:
    spec = write_spec(f'id = "m"\nfactory = "{factory}"')
    with pytest.raises(SpecError, match=message):
        spec.load_model()


def test_two_folders_with_a_module_of_the_same_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "isthmus_same.py").write_text("from torch import nn\n\nbuild = nn.ReLU\n")
        (tmp_path / name / "m.toml").write_text('id = "m"\nfactory = "isthmus_same:build"')
    load_spec(tmp_path / "one" / "m.toml").load_model()
    with pytest.raises(SpecError, match="was already imported from .*one.*rename one of the two"):
        load_spec(tmp_path / "two" / "m.toml").load_model()


def test_unknown_references(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r'no model "digit": .*Did you mean digits'):
        load_spec("digit")
    with pytest.raises(SpecError, match=rf"{re.escape(str(tmp_path))}/none\.toml: cannot be read: No such file"):
        load_spec(tmp_path / "none.toml")


def test_labels_from_files(write_spec: Write, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("a\nb\n")
    (tmp_path / "labels.json").write_text('["c", "d"]')
    assert write_spec(BASE + 'labels = "labels.txt"').labels == ("a", "b")
    assert write_spec(BASE + 'labels = "labels.json"').labels == ("c", "d")


def test_models_that_are_built_at_once_have_the_same_seeded_weights(tmp_path: Path) -> None:
    """There is one generator for all threads."""
    (tmp_path / "drawn.py").write_text(
        "import time, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.ModuleList()\n"
        "        for _ in range(5):\n"
        "            self.layers.append(torch.nn.Linear(4, 4))\n"
        "            time.sleep(0.002)\n"
    )
    file = tmp_path / "drawn.toml"
    file.write_text('id = "drawn"\nfactory = "drawn:Net"\n')
    spec = load_spec(str(file))
    made: list[torch.nn.Module] = []
    threads = [threading.Thread(target=lambda: made.append(spec.load_model("cpu"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({weights_hash(model) for model in made}) == 1 and len(made) == 6
