"""What a person may try and get wrong: exactly one line, which says what to do. Most run in this process.

A row: the command, its words, what the line has. ``{w}`` is the folder of `files`, where each test begins.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import edge_client
from cloud_server.__main__ import main as cloud_server
from edge_client import EdgeClient, ModelChoice, sources
from edge_client.__main__ import main as edge_main
from shared_hooks import WrappedModel
from shared_hooks.errors import IsthmusError
from shared_hooks.models import load_spec
from tests.shipped import IMAGES

IDENTITY = 'id = "a"\nfactory = "torch.nn:Identity"\n'
EXAMPLE = "[[example.args]]\nshape = [1, 4]\n"
SPECS = {
    "no_factory": 'id = "a"\n',
    "no_id": 'factory = "torch.nn:Identity"\n',
    "no_toml": "id = a",
    "wrong_key": IDENTITY + 'weight = "x.safetensors"\n',
    "wrong_id": 'id = "a b"\nfactory = "torch.nn:Identity"\n',
    "pickle": IDENTITY + 'weights = "x.pt"\n',
    "absent_weights": IDENTITY + 'weights = "no.safetensors"\n' + EXAMPLE,
    "wrong_weights": IDENTITY + 'weights = "nonsense.safetensors"\n' + EXAMPLE,
    "no_module": 'id = "a"\nfactory = "no_such_module:Net"\n' + EXAMPLE,
    "no_name": 'id = "a"\nfactory = "torch.nn:Linaer"\n' + EXAMPLE,
    "no_arguments": 'id = "a"\nfactory = "torch.nn:Linear"\n' + EXAMPLE,
    "no_model": 'id = "a"\nfactory = "os.path:join"\nfactory_kwargs = {a = "x"}\n' + EXAMPLE,
    "fails_on_import": 'id = "a"\nfactory = "failing:Net"\n' + EXAMPLE,
    "wrong_shape": IDENTITY + "[[example.args]]\nshape = [-1]\n",
    "wrong_dtype": IDENTITY + '[[example.args]]\nshape = [1]\ndtype = "floot32"\n',
    "no_range": IDENTITY + '[[example.args]]\nshape = [1]\ndtype = "int64"\n',
    "does_not_fit": 'id = "a"\nfactory = "torch.nn:Linear"\nfactory_kwargs = {in_features = 9, out_features = 2}\n'
    + EXAMPLE,
    "wrong_keyword": IDENTITY + "[example.kwargs.y]\nshape = [1]\n",
    "no_example": IDENTITY,
    "wrong_mean": IDENTITY + "[preprocess]\nmean = [0.1, 0.2]\n",
    "no_labels": IDENTITY + 'labels = "no.txt"\n' + EXAMPLE,
    "wrong_top_k": IDENTITY + "[postprocess]\ntop_k = 0\n",
    "wrong_draw": IDENTITY + '[draw]\nscores = "s"\n',
    "no_postprocess": IDENTITY + 'postprocess = "no_such_module:x"\n' + EXAMPLE,
    "no_hook": '[lifecycle]\nhooks = ["no_such_module:X"]\n',
    "wrong_table": "[lifecicle]\n",
    "server_model": '[models]\nm = "no_factory.toml"\n',
    "server_limit": "[limits]\nworkers = 1\n",
    "settings": 'server = "127.0.0.1:9"\n',
    "server_key": 'listne = "a"\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    (made / "empty").mkdir()
    shutil.copy(IMAGES / "0011_label1.png", made / "ok.png")
    (made / "broken.png").write_bytes(b"\x89PNG and no more")
    (made / "words.txt").write_text("hello")
    (made / "net.py").write_text("Net = None\n")
    (made / "failing.py").write_text("raise RuntimeError('boom')\n")
    (made / "nonsense.safetensors").write_bytes(b"12345678 nonsense")
    np.save(made / "shape.npy", np.ones((1, 7, 3), dtype=np.float32))
    np.save(made / "integers.npy", np.ones((1, 1, 32, 32), dtype=np.int64))
    np.save(made / "objects.npy", np.array([{}], dtype=object))
    for name, text in SPECS.items():
        (made / f"{name}.toml").write_text(text)
    return made


@pytest.fixture(autouse=True)
def begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("ISTHMUS_SERVER", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", os.devnull)
    yield


EDGE: list[tuple[str, str]] = [
    ("", "say what to do: layers, verify, "),
    ("rnu", "Did you mean run"),
    ("--vresion", "Did you mean --version"),
    ("layers digits", "a model is named by --model digits"),
    ("layers --model digitz", "Did you mean digits?"),
    ("bench --server 127.0.0.1:9 --rate 0", "'0' is not a number above 0"),
    ("bench --server 127.0.0.1:9 --rate 10,-1", "'-1' is not a number above 0"),
    ("bench --server 127.0.0.1:9 --split stage2=0", "NAME or NAME=WEIGHT with a weight above 0"),
    ("bench --server 127.0.0.1:9 --arrivals poison", "Did you mean poisson?"),
    ("bench --server 127.0.0.1:9 --processes 9", "--processes 9: more than the 4 clients"),
    ("bench --server 127.0.0.1:9 --html no/where.html", "--html: no/where.html cannot be written: No such file"),
    ("bench --rate 5", "no server: "),
    ("layers --model no.toml", "no.toml: cannot be read: No such file"),
    ("layers --model empty", 'and not "module:callable"'),
    ("layers --model words.txt", "words.txt: not valid TOML"),
    ("layers --model net.py", 'A model in a Python file is named "net:CALLABLE"'),
    ("layers --model no.pt", "model names what builds it, weights a file of safetensors"),
    ("layers --model nonsense.safetensors", "model names what builds it, weights a file of safetensors"),
    ("layers --model wrong_mean.tml", "Did you mean wrong_mean.toml"),
    ("layers --model wrong_top_k", "Did you mean wrong_top_k.toml"),
    ("layers --model wrng_mean.toml", "No such file or directory. Did you mean wrong_mean.toml"),
    ("layers --model resnet18", 'named as "torchvision.models:resnet18"'),
    ("layers --model torch.nn.Identity", 'Did you mean "torch.nn:Identity"?'),
    ("layers --model no_such.module:Net", 'cannot import "no_such.module"'),
    ("layers --model no_factory.toml", 'factory: missing; expected "module:callable"'),
    ("layers --model no_id.toml", "id: missing; expected a string"),
    ("layers --model no_toml.toml", "not valid TOML"),
    ("layers --model wrong_key.toml", "Did you mean weights?"),
    ("layers --model wrong_id.toml", "expected up to 128 letters"),
    ("layers --model pickle.toml", "expected a safetensors file"),
    ("layers --model absent_weights.toml", "no such weights file: "),
    ("layers --model wrong_weights.toml", "is not a safetensors file that can be read"),
    ("layers --model no_module.toml", 'cannot import "no_such_module"'),
    ("layers --model no_name.toml", "Did you mean Linear"),
    ("layers --model no_arguments.toml", "missing 2 required positional arguments"),
    ("layers --model no_model.toml", "returned str; expected a torch.nn.Module"),
    ("layers --model fails_on_import.toml", "raised RuntimeError: boom"),
    ("layers --model wrong_shape.toml", "example.args[0].shape: expected sizes of at least 0"),
    ("layers --model wrong_dtype.toml", "Did you mean float32"),
    ("layers --model no_range.toml", "integers are drawn from [low, high), or give fill"),
    ("layers --model does_not_fit.toml", "fails on its example: RuntimeError: "),
    ("verify --model does_not_fit.toml", "(--example and --input say another)"),
    ("layers --model wrong_keyword.toml", "unexpected keyword argument 'y'"),
    ("layers --model no_example.toml", "no example input to plan on; give one with --"),
    ("layers --model wrong_mean.toml", "expected 1 or 3 numbers for mode RGB, found 2"),
    ("layers --model no_labels.toml", "no.txt cannot be read"),
    ("layers --model wrong_top_k.toml", "expected an integer of at least 1, found 0"),
    ("layers --model wrong_draw.toml", "expected where boxes, masks or classes are in the output"),
    ("layers --weights no.safetensors", "no such weights file: no.safetensors"),
    ("layers --weights empty", "Is a directory"),
    ("layers --selection no.safetensors", "no such selection file"),
    ("layers --selection words.txt", "is not a file of edge-client prune"),
    ("layers --depth 0", "is not a number of at least 1"),
    ("layers --device gpu", "finds none here; expected auto, cpu"),
    ("layers --device cuda:99", "is not available"),
    ("layers --threads 1000000000", "threads must be 1 to 1024"),
    ("layers --json empty", "Is a directory"),
    ("layers --explain nope", "edge-client layers lists them"),
    ("layers --explain 999", "layer ids are 0 to 48"),
    ("layers --example 1,a", "expected sizes such as 1,3,224,224"),
    ("layers --example 1,3,64,64", "to have 1 channels, but got 3 channels"),
    ("layers --input no.png", "Did you mean ok.png"),
    ("layers --input shape.npy", "image is float32 [1, 7, 3], in the example float32 [1, 1, 32, 32]"),
    ("layers --input empty", "empty holds no input; looked for "),
    ("layers --input words.txt", "(images, .npy and .safetensors are read)"),
    ("layers --input clip.mp4", "videos and cameras are inputs of run"),
    ("RUN no.png", "Did you mean ok.png"),
    ("RUN *.jpg", 'no input file matches "*.jpg"'),
    ("RUN broken.png", "cannot be read as an image"),
    ("RUN shape.npy", "image is float32 [1, 7, 3], in the example float32 [1, 1, 32, 32]"),
    ("RUN integers.npy", "image is int64 [1, 1, 32, 32], in the example float32 [1, 1, 32, 32]"),
    ("RUN objects.npy", "cannot be read as a .npy array"),
    ("RUN nonsense.safetensors", "cannot be read as safetensors"),
    ("RUN /dev/video97", "no such camera"),
    ("RUN ok.png --frames 3", "--frames is for a video or a camera"),
    ("RUN ok.png --camera-size 3", "such as 640x480"),
    ("RUN ok.png --queue 3", "are for a camera"),
    ("RUN ok.png --in-flight 0", "is not a number of at least 1"),
    ("RUN ok.png --warmup -1", "is not a number of at least 0"),
    ("RUN ok.png --output words.txt", "words.txt cannot be a folder"),
    ("RUN ok.png --deadline 0", "is not a number of seconds above 0"),
    ("RUN ok.png --codec zip", "is not one of raw, lz4, "),
    ("RUN ok.png --witness 2", "is not a share from 0 to 1"),
    ("RUN ok.png --witness 0.5", "--split edge-only splits none"),
    ("RUN ok.png --observe nope", "There are activation, "),
    ("RUN ok.png --heat-maps d", "--heat-maps needs --observe attention"),
    ("RUN ok.png --only-head stem.0", "--split edge-only needs the whole model here"),
    ("RUN ok.png --fallback cloud", "is not one of edge"),
    ("RUN ok.png --journal empty", "Is a directory"),
    ("RUN ok.png --journal words.txt", "is left as it is; give another file"),
    ("RUN ok.png --config no_hook.toml", 'cannot import "no_such_module"'),
    ("RUN ok.png --config wrong_table.toml", "Did you mean lifecycle?"),
    ("RUN ok.png --cert x", "a certificate needs its key"),
    ("RUN shape.npy --model no_postprocess.toml", 'cannot import "no_such_module"'),
    ("SPLIT 0", "give --server HOST:PORT, set ISTHMUS_SERVER, "),
    ("SPLIT net.0.conv2 --server 127.0.0.1:1", "the model is digits, the default: --model names another"),
    ("SPLIT edge_only", "no server: give --server"),
    ("SPLIT 0 --server host", "expected HOST:PORT"),
    ("SPLIT 0 --server http://host:5", "expected HOST:PORT"),
    ("SPLIT 0 --server host:99999", "expected HOST:PORT"),
    ("SPLIT 0 --server 127.0.0.1:1", "ServerUnavailable: no server at 127.0.0.1:1"),
    ("SPLIT nope --server 127.0.0.1:1", "edge-client layers lists them"),
    ("SPLIT EDGE-ONLY --server none", "no server"),
    ("SPLIT stage9 --server 127.0.0.1:1", "Did you mean stage"),
    ("SPLIT resnet.layers.conv2 --server 127.0.0.1:1", "Did you mean stage"),
    ("SPLIT net.0.conv2 --server 127.0.0.1:1", "Did you mean stage"),
    ("SPLIT edge_only --server 127.0.0.1:1", "Did you mean edge-only"),
    ("SPLIT 0 --server 127.0.0.1:1 --ca no.pem", "no.pem: cannot be read"),
    ("SPLIT 0 --server 127.0.0.1:1 --token-file no", "no: cannot be read"),
    ("SPLIT auto --server 127.0.0.1:1 --objective speed", "one of latency, energy, "),
    ("SPLIT auto --server 127.0.0.1:1 --max-edge-memory big", "expected 64MiB, 500kB"),
    ("SPLIT auto --server 127.0.0.1:1 --partitioner x", "no such partitioner"),
    ("watch --input ok.png --split 0", "no server: give"),
    ("hooks --split 0", "nothing is run without --input"),
    ("hooks --input ok.png --server 127.0.0.1:1", "say where to cut, too"),
    ("doctor", "no server: give"),
    ("doctor --server own", "give HOST:PORT in place of own"),
    ("layers --no-progres", "Did you mean --no-progress"),
    ("SPLIT 0 --config settings.toml", "server: belongs under [client]"),
    ("doctor own", "give HOST:PORT in place of own"),
    ("verify --server 127.0.0.1", "expected HOST:PORT"),
    ("plan --uplink 5mbit", "needs --uplink and --rtt"),
    ("plan --uplink fast --rtt 1ms", "expected 5mbit, 800kbit or 1gbit"),
    ("plan --objective x", "one of latency, energy, "),
    ("plan --power-active 3", "--power-active and --power-idle go together"),
    ("plan --edge-profile no.json", "no.json cannot be read"),
    ("plan --max-bytes-per-second 5", "--max-bytes-per-second and --rate"),
    ("profile --side cloud", "is measured by a server: give --server"),
    ("profile --side moon", "is not one of edge, cloud, both"),
    ("sweep", "required: --output"),
    ("sweep --output words.txt", "cannot be a folder of results"),
    ("sweep --output s --cuts nope", "edge-client layers lists them"),
    ("sweep --output s --cuts stem.0 --every 2", "not allowed with argument --cuts"),
    ("compare a", "required: B"),
    ("compare empty empty", "is not the folder of a sweep"),
    ("prune --input empty", "required: --split"),
    ("calibrate", "required: --input"),
    ("calibrate --input empty", "--input: empty holds no input"),
    ("calibrate --input ok.png --max-loss 100%", "--max-loss 100%: expected a share from 0 to less than 1"),
    ("calibrate --input ok.png --max-loss -1%", "expected"),
    ("calibrate --input ok.png --labels words.txt", "found 1 columns"),
    ("calibrate --input ok.png --codecs zip", '--codecs zip: "zip" is not one of raw'),
    ("calibrate --input ok.png --max-loss 5", "Did you mean 5%?"),
    ("calibrate --input ok.png --learn 1", "--learn 1: of 1 inputs none would be left to judge by"),
    ("compare nowhere.json nowhere.json", "nowhere.json: no such file or folder"),
    ("calibrate --input ok.png --cuts stem.9", 'no layer "stem.9"'),
    ("run --split stem.0 --input ok.png --server own --codec auto --max-loss 1%", "needs --calibration"),
    ("run --split stem.0 --input ok.png --server own --codec auto --calibration words.txt --max-loss 1%", "not JSON"),
    ("run --split stem.0 --input ok.png --server own --codec int8 --max-loss 1%", "--max-loss is for --codec auto"),
    ("run --split stem.0 --input ok.png --objective speed", "--objective has an effect with --split auto only"),
    ("run --split stem.0 --input ok.png --max-edge-memory 1KiB", "--max-edge-memory has an effect with --split auto"),
    ("run --split stem.0 --input ok.png --min-accuracy 0.7", "a cut that is given (stem.0) is not chosen"),
    ("run --split edge-only --input ok.png --codec int8", "--codec has no effect with --split edge-only"),
    ("run --split edge-only --input ok.png --camera-size 8x8", "--camera-... are for a camera"),
    ("run --split auto --input ok.png --server own --power-idle 3", "--power-active and --power-idle go together"),
    ("run --help everything", '"everything" is not one of all'),
    ("plan --codec auto --max-loss 100%", "expected a share"),
    ("hierarchy --split stem.0", "--split goes together with --head-onnx"),
    ("hierarchy --validate", "--validate needs a file to check"),
]

CLOUD: list[tuple[str, str]] = [
    ("--wrong", "there is no option --wrong"),
    ("no.toml", "no.toml: cannot be read"),
    ("words.txt", "not valid TOML"),
    ("wrong_key.toml", "is a model's spec, and no configuration: --model wrong_key.toml"),
    ("server_model.toml", "models.m: "),
    ("server_limit.toml", "unknown key in [limits]"),
    ("server_key.toml", "Did you mean listen"),
    ("--model digitz", "Did you mean digits?"),
    ("--weights b=x.safetensors", "there is: digits"),
    ("--model a=digits --model b=digits --weights x.safetensors", "say NAME=x.safetensors"),
    ("--model digits --model digits", 'two are called "digits"'),
    ("--listen host", "expected HOST:PORT"),
    ("--listen 0.0.0.0:0", "or give --insecure"),
    ("--threads 0", "expected at least 1, found 0"),
    ("--workers 0", "expected at least 1, found 0"),
    ("--device tpu", "finds none here; expected auto, cpu"),
    ("--cert x", "the one needs the other"),
    ("--identities no.toml", "no.toml: cannot be read"),
    ("--replicas 3", "only with --on ray"),
    ("--metrics x", "expected HOST:PORT"),
    ("--drain-seconds -1", "expected a number above 0"),
    ("--example 1,a", "expected sizes such as 1,3,224,224"),
    ("--listen 127.0.0.1:0 --model does_not_fit.toml", "the model fails on its example"),
    ("--listen 127.0.0.1:0 --threads 1000000000", "threads must be 1 to 1024"),
    ("token", "required: NAME"),
    ("token a+b= --days 1", "an identity's name has"),
    ("token x --output empty/no/x", "No such file or directory"),
]


def reported(
    main: Callable[[list[str]], int], words: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int | str | None, list[str]]:
    try:
        status: int | str | None = main(words)
    except SystemExit as ended:
        status = ended.code
    return status, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("words", "said"), EDGE)
def test_the_edge(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = words.replace("RUN", "run --split edge-only --input")
    words = words.replace("SPLIT", "run --input ok.png --patience 0.1 --split")
    status, lines = reported(edge_main, words.split(), capsys)
    assert status in (1, 2, 3) and len(lines) == 1, lines
    assert lines[0].startswith("edge-client") and said in lines[0]


@pytest.mark.parametrize(("words", "said"), CLOUD)
def test_the_cloud(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    here = [] if "--listen" in words or words.startswith("token") else ["--listen", "127.0.0.1:0"]
    status, lines = reported(cloud_server, [*words.split(), *here], capsys)
    assert status in (1, 2) and len(lines) == 1, lines
    assert lines[0].startswith("cloud-server") and said in lines[0]


SMALL = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
PYTHON: list[tuple[Callable[[], Any], str]] = [
    (lambda: EdgeClient("nowhere", "digits"), "expected HOST:PORT"),
    (lambda: EdgeClient(None, "digitz"), "Did you mean digits?"),
    (lambda: EdgeClient(None, "digits", codec="zip"), "must be one of raw, lz4"),
    (lambda: EdgeClient(None, "digits", witness=3), "witness"),
    (lambda: EdgeClient(None, "digits", fallback="cloud"), 'must be "edge" or None'),  # type: ignore[arg-type]
    (lambda: EdgeClient(None, "digits", deadline=-1), "deadline"),
    (lambda: EdgeClient(None, "digits", observers=["nope"]), "There are activation, "),
    (lambda: EdgeClient(None, ModelChoice("digits", device="tpu")), "expected auto"),
    (lambda: EdgeClient(None, ModelChoice("digits", threads=0)), "threads must be 1 to 1024"),
    (lambda: EdgeClient(None, ModelChoice("digits", example="1,a")), "expected sizes such as"),
    (lambda: EdgeClient(None, "digits", "edge-only").infer(torch.ones(3)), "in the example float32 [1, 1, 32, 32]"),
    (lambda: EdgeClient(None, "digits", "edge-only").infer(3.5), "image is of type float, in the example float32"),
    (lambda: EdgeClient(None, "digits", "edge-only").infer("a good day"), "what the model's tokenizer makes"),
    (lambda: EdgeClient("own", "digits"), "with edge_client.local_server(MODEL) as server"),
    (lambda: EdgeClient("none", "digits"), 'give None, and split="edge-only"'),
    (lambda: load_spec("no.toml"), "cannot be read"),
    (lambda: WrappedModel(SMALL).head("nope", torch.ones(1, 4)), "no layer 'nope'"),
    (lambda: WrappedModel(SMALL).head(9, torch.ones(1, 4)), "layers 0 to 2"),
    (lambda: WrappedModel(SMALL).head(True, torch.ones(1, 4)), "a cut is a layer id, a layer name"),
    (lambda: edge_client.layers(SMALL.train()), "eval()"),
    (lambda: WrappedModel(nn.ModuleDict({"body": SMALL})["body"]).head("net.2", torch.ones(1, 4)), "no layer 'net.2'"),
    (lambda: edge_client.layers(3), "a model is a name"),  # type: ignore[arg-type]
    (lambda: edge_client.plan("digits", "digits"), "the server comes first, then the model"),
    (
        lambda: EdgeClient("127.0.0.1:1", "digits", split="stem.O").open(),
        "no layer 'stem.O' ran in this model. Did you",
    ),
    (lambda: EdgeClient("127.0.0.1:1", "digits", split="atuo").open(), "Did you mean auto?"),
    (
        lambda: EdgeClient(None, "digits", "edge-only").infer_many([], failures="retrun"),  # type: ignore[call-overload]
        'failures=\'retrun\': must be "raise" or "return". Did you mean return?',
    ),
    (lambda: EdgeClient(None, "digits", observers="atention"), 'called "atention". Did you mean attention, '),
    (lambda: sources.live("pics"), "live takes an iterable of frames"),  # type: ignore[arg-type]
    (lambda: edge_client.layers(SMALL, torch.ones(1, 4))["O"], "no layer or block 'O'"),
    (lambda: WrappedModel(SMALL).explain("0"), "no plan yet: call plan() or forward() with example inputs first"),
]


@pytest.mark.parametrize(("misuse", "said"), PYTHON, ids=[said for _, said in PYTHON])
def test_python(misuse: Callable[[], Any], said: str) -> None:
    try:
        with pytest.raises(IsthmusError) as wrong:
            misuse()
    finally:
        SMALL.eval()
    assert said in str(wrong.value) and "\n" not in str(wrong.value)


def test_there_are_enough() -> None:
    assert len({*EDGE, *CLOUD}) + len(PYTHON) >= 160
