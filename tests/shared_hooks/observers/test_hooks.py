"""Observers by name: asked for with a request, allowed by the server's configuration, back with the answer, shown."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloud_server.config import ModelEntry, read_config
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.models.served_model import ServedModel
from cloud_server.transport.server import CloudServer
from edge_client import EdgeClient
from edge_client.__main__ import main
from edge_client.call import Call
from edge_client.commands.watch import MODULE, _room
from edge_client.screen import ObservationTable, tables
from edge_client.transport.times import Stamps
from shared_hooks import WrappedModel
from shared_hooks.errors import BadFrame, ObserverRefused, SpecError
from shared_hooks.models import load_spec
from shared_hooks.observers import ObservedCall, Observer, Transform, kinds, named
from shared_hooks.observers.kinds.memory import Tokens
from tests.shared_hooks.observers.left import hooks_left
from tests.shared_hooks.observers.small import Residual, image
from tests.shipped import IMAGES

CUT = "stage2.0.conv1"
RESIDUAL = "m=tests.shared_hooks.observers.small:Residual"


@contextmanager
def server(spec: str, *observers: str) -> Iterator[str]:
    """A server that allows these observers; its address. Nothing may be left on its model."""
    served = ServedModel(ModelEntry(load_spec(spec)), torch.device("cpu"))
    server = CloudServer(Core([served], Limits(), observers=observers), "127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.stop(grace=1)
        served._wrapped.detach()
        assert not hooks_left(served._wrapped.model)


class Means(Observer):
    """An observer of a user's own."""

    def observe(self, call: ObservedCall, name: str, step: int) -> Any:
        return {"name": name, "mean": float(call.output.mean())}


class Silence(Transform):
    """An intervention that an operator allows by name: every convolution's output becomes 0."""

    def __init__(self) -> None:
        super().__init__(lambda module, inputs, output, name: output * 0, "type:Conv2d")


def broken() -> Observer:
    raise RuntimeError("no camera")


def test_observers_of_ones_own_by_module_and_class() -> None:
    """On both sides, where the server allows them by that name; a Transform changes both sides' layers."""
    means, silence = f"{__name__}:Means", f"{__name__}:Silence"
    with server(RESIDUAL, means, silence) as address:
        with EdgeClient(address, RESIDUAL, "stem", observers=[means]) as client:
            seen = client.infer(image())
            expected = seen.output
        found = [seen.observations[side][means]["records"] for side in ("edge", "cloud")]
        assert [one["name"] for one in found[0]] == ["stem"]
        assert [one["name"] for one in found[1]] == ["body.0", "body.1", "body.2", "classifier"]
        with EdgeClient(address, RESIDUAL, "stem", observers=[silence]) as client:
            changed = client.infer(image())
            assert not torch.equal(changed.output, expected) and changed.transforms
            assert torch.equal(changed.output, client.infer(image(), split="edge-only").output)
        with EdgeClient(address, RESIDUAL, "stem") as client:
            assert torch.equal(client.infer(image()).output, expected)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere:Means", "nowhere"),
        (f"{__name__}:Mens", "Did you mean Means"),
        (f"{__name__}:broken", r"making it raised RuntimeError: no camera .*test_hooks.py"),
        (f"{__name__}:image", "it makes a Tensor, and no shared_hooks.observers.Observer"),
        ("activatoin", "Did you mean activation.*module:Class of your own"),
    ],
)
def test_an_observer_that_cannot_be_had_is_refused_by_name(name: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        named.check([name])


def test_both_sides_come_back_with_the_answer() -> None:
    with server(RESIDUAL, *kinds.OBSERVERS) as address:
        with EdgeClient(address, RESIDUAL, "body.1") as plain:
            expected = plain.infer(image())
        assert expected.observations == {}
        with EdgeClient(address, RESIDUAL, "body.1", observers=kinds.OBSERVERS) as client:
            answer = client.infer(image())
            local = client.infer(image(), split="edge-only")
    assert torch.equal(answer.output, expected.output) and torch.equal(local.output, expected.output)
    edge, cloud = answer.observations["edge"], answer.observations["cloud"]
    assert set(edge) == set(cloud) == set(kinds.OBSERVERS)
    for hook in ("activation", "memory"):
        assert [record["name"] for record in edge[hook]["records"]] == ["stem", "body.0", "body.1"]
        assert [record["name"] for record in cloud[hook]["records"]] == ["body.2", "classifier"]
    last = cloud["activation"]["records"][-1]
    assert last["shape"] == [2, 5] and last["max"] == pytest.approx(expected.output.max().item())
    ids = [record["ids"] for record in cloud["tokens"]["records"]]
    assert ids == expected.output.topk(5)[1].tolist() and edge["tokens"]["records"] == []
    assert "no module of this model is called attention" in cloud["attention"]["notes"][0]
    assert set(local.observations) == {"edge"} and len(local.observations["edge"]["activation"]["records"]) == 5


def test_nan_is_found_on_the_side_where_it_appears() -> None:
    bad = image()
    bad[0, 0, 0, 0] = math.nan
    with server(RESIDUAL, "debug") as address, EdgeClient(address, RESIDUAL, "stem", observers=["debug"]) as client:
        found = client.infer(bad).observations
        assert [record["name"] for record in found["edge"]["debug"]["records"]] == ["stem"]
        assert found["cloud"]["debug"]["records"][0]["name"] == "body.0"
        assert client.infer(image()).observations["cloud"]["debug"]["records"] == []


def test_a_hook_that_the_server_does_not_allow_is_permission_denied() -> None:
    status = ObserverRefused.status
    assert status == "PERMISSION_DENIED"
    with server(RESIDUAL, "debug") as address:
        with EdgeClient(address, RESIDUAL, "stem", observers=["debug", "memory"]) as client:
            with pytest.raises(ObserverRefused, match='"memory" is not allowed on this server; allowed: debug'):
                client.infer(image())
            assert client.infer(image(), split="edge-only").observations["edge"]["memory"]["records"]
        with EdgeClient(address, RESIDUAL, "stem") as client:
            client.infer(image())
    with pytest.raises(SpecError, match='no observer is called "memroy". Did you mean memory?'):
        EdgeClient("127.0.0.1:1", RESIDUAL, observers=["memroy"])


def test_observers_are_those_of_the_moment_when_a_request_is_begun() -> None:
    with server(RESIDUAL, "debug") as address, EdgeClient(address, RESIDUAL, "stem") as client:
        for hooks, later in ((("debug",), ()), ((), ("debug",))):
            client.observers = hooks
            running = client.requests.begin(Call((image(),)), "stem", Stamps(), client.until(None))
            client.observers = later
            assert set(client.requests.finish(running).observations) == ({"edge", "cloud"} if hooks else set())


def test_the_configuration_says_what_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[observers]\nallow = ["activation", "debug"]\n')
    assert read_config(file).observers == ("activation", "debug")
    file.write_text('[models]\ndigits = "digits"\n')
    assert read_config(file).observers == ()
    for wrong, says in (('allow = ["actvation"]', "activation"), ("allow = [3]", "names"), ("deny = []", "deny")):
        file.write_text(f"[observers]\n{wrong}\n")
        with pytest.raises(SpecError, match=says):
            read_config(file)


def test_an_answer_says_that_transforms_change_it() -> None:
    with server(RESIDUAL) as address, EdgeClient(address, RESIDUAL, "body.1") as client:
        assert client.infer(image()).transforms == ()
        with Transform(lambda *given: given[2] * 2, "stem").attach(client.wrapped):
            assert client.infer(image()).transforms == ("stem",)
        assert client.infer(image()).transforms == ()


def test_other_threads_forwards_are_not_in_an_answer() -> None:
    with WrappedModel(Residual()) as wrapped:
        wrapped.plan(image())
        with named.observing(wrapped, ["activation"]) as here:
            thread = threading.Thread(target=wrapped.forward, args=(image(),))
            thread.start()
            thread.join(30)
            assert here()["activation"]["records"] == []
            wrapped.forward(image())
            assert len(here()["activation"]["records"]) == 5


def test_returned_observations_are_bounded() -> None:
    record = {"name": "x" * 1000, "step": 0}
    one = {"records": [record] * 2000, "notes": [], "left_out": 1, "failures": 0, "last_failure": "", "cost_ns": 1}
    found: named.Observations = {"activation": one, "debug": {**one, "records": [record]}}
    data = named.to_bytes(found)
    assert len(data) <= named.MAX_BYTES
    again = named.from_bytes(data)
    kept = again["activation"]
    assert kept["records"] and len(kept["records"]) + kept["left_out"] == 2001
    assert again["debug"] == found["debug"] and len(one["records"]) == 2000  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{",
        b"\xff",
        b'{"shell": {}}',
        b'{"debug": 3}',
        b'{"debug": {"records": [{"name": "m", "nan": NaN}], "notes": [], "left_out": 0, "failures": 0,'
        b' "last_failure": "", "cost_ns": 0}}',
        b'{"debug": {"records": [1]}}',
        b"[" * 10_000,
        b" " * (named.MAX_BYTES + 1),
    ],
)
def test_malformed_observations_are_refused(data: bytes) -> None:
    with pytest.raises(BadFrame, match="malformed observations"):
        named.from_bytes(data)


def shown(hook: str, record: dict[str, Any]) -> tuple[str, ...]:
    found = {"records": [record], "notes": [], "left_out": 0, "failures": 0, "last_failure": "", "cost_ns": 0}
    (table,) = tables({"cloud": {hook: found}})
    (row,) = table.rows
    return row


def test_a_table_has_numbers_that_json_does_not_have() -> None:
    record = named.plain(Tokens("head", 0, 0, (3, 1), (math.nan, 2.0), (math.nan, 0.5), ()))
    assert shown("tokens", record)[2:] == ("0", "3 nan, 1 0.500")
    assert shown("attention", {"name": "m", "entropy": [0.25, "nan"]})[3] == "0.25, nan"


def test_an_observer_without_a_table_of_its_own_is_shown_as_it_is() -> None:
    record = {"name": "m", "part": "", "norm": 0.25, "shape": [1, 2], "text": "x" * 100, **dict.fromkeys("abcd", 1)}
    assert shown("norms", record) == ("cloud", "m", "0.25", "1, 2", "x" * 40, "1", "1", "1")


NUMBERS = st.sampled_from([0, -3, 0.25, math.inf, 10**400, True, "nan", "x", None])
LISTS = st.lists(NUMBERS | st.lists(NUMBERS, max_size=2), min_size=1, max_size=3)
READINGS = st.fixed_dictionaries({"value": NUMBERS, "status": NUMBERS})
COLUMNS = {
    **dict.fromkeys("shape entropy positions where ids text probabilities".split(), LISTS),
    **dict.fromkeys("allocated growth peak".split(), READINGS | NUMBERS),
    **dict.fromkeys("mean output_bytes nan row part".split(), NUMBERS),
}


@pytest.mark.parametrize("name", kinds.OBSERVERS)
@given(record=st.fixed_dictionaries(COLUMNS))
def test_a_table_shows_whatever_a_server_says(name: str, record: dict[str, Any]) -> None:
    assert shown(name, {"name": "m", **record})[0] == "cloud"


LEAVES = st.none() | st.floats() | st.text() | st.integers()


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.tuples(inner)))
def test_records_become_plain_json(value: Any) -> None:
    json.dumps(named.plain(value), allow_nan=False)


def test_run_shows_them_and_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(sorted(IMAGES.glob("*.png"))[0])
    with server("digits", "activation", "debug") as address:
        common = ["run", "--server", address, "--split", CUT, "--input", file]
        assert main([*common, "--observe", "activation,debug"]) == 0
        text = capsys.readouterr().out
        assert "activation, of the last input" in text and "no NaN and no Inf" in text
        sides = [line.split()[:2] for line in text.splitlines() if line.startswith(("edge  ", "cloud  "))]
        assert ["edge", CUT] in sides and ["cloud", "classifier"] in sides
        assert main([*common, "--observe", "activation", "--json", "-"]) == 0
        (one,) = json.loads(capsys.readouterr().out)["inputs"]
        assert [*one["observations"]] == ["edge", "cloud"] and one["transforms"] == []
        assert one["observations"]["cloud"]["activation"]["records"][-1]["name"] == "classifier"
        assert main([*common, "--observe", "memory"]) == 1
        assert 'the observer "memory" is not allowed' in capsys.readouterr().err
        assert main([*common, "--observe", "activaton"]) == 2
        assert "Did you mean activation?" in capsys.readouterr().err


def test_watch_shows_every_answer(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in sorted(IMAGES.glob("*.png"))[:2]]
    inputs = [part for file in files for part in ("--input", file)]
    with server("digits", "activation", "debug", "tokens") as address:
        assert (
            main(["watch", "--server", address, "--split", CUT, *inputs, "--repeat", "2", "--observe", "tokens"]) == 0
        )
        text = capsys.readouterr().out
        assert text.count(f"cut after {CUT}") == 4 and text.count("tokens") == 4 and "answer 4" in text
        assert main(["watch", "--server", address, "--split", "nowhere", *inputs]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_watch_shows_names_and_numbers_whole_or_their_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no terminal nothing is cut; in a narrow one a number is still all of it, a name its end."""
    monkeypatch.setenv("COLUMNS", "60")
    image = str(min(IMAGES.glob("*.png")))
    with server("digits", "activation") as address:
        assert main(["watch", "--server", address, "--split", CUT, "--input", image, "--observe", "activation"]) == 0
    assert "stage3.0.shortcut.1" in capsys.readouterr().out
    found = ObservationTable("activation", ("side", "module", "mean"), [("edge", "a.long.name.of.one", "-4.6e-10")], [])
    assert _room(found, 30) == 30 - 4 - 8 - 6 and _room(found, 5) == MODULE


def test_watch_plans_on_the_first_input_where_the_spec_has_no_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "image.npy", image(batch=1).numpy())
    with server(RESIDUAL, "activation") as address:
        words = ["watch", "--server", address, "--model", RESIDUAL, "--input", str(tmp_path), "--observe", "activation"]
        assert main([*words, "--split", "body.0"]) == 0
        assert "cut after body.0" in capsys.readouterr().out
        assert main([*words, "--split", "body.7"]) == 2
        assert "Did you mean body." in capsys.readouterr().err
