"""What a plan is made of: files that are of something else are refused or marked, never silently used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edge_client.model_choice import ModelChoice
from edge_client.process import local_server
from edge_client.survey import LEAST_PROBED, SurveySources, _of_another_machine, _served, edge_profile, probe_sizes
from edge_client.survey import _file as file_of
from edge_client.user_input import LoadedModel, load
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import SpecError
from shared_hooks.profiling import profile as profiles
from shared_hooks.profiling.machine import describe
from shared_hooks.profiling.profile import FileInput, Profile
from shared_hooks.profiling.profiler import ProfileOptions, profile_edge
from tests.edge_client.planning.made import MS, Layer, exactly, profile

IMAGE = Path("shared_hooks/models/digits/images/0011_label1.png").resolve()


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    found = load(ModelChoice("digits", device="cpu"))
    with found.wrapped:
        yield found


@pytest.fixture(scope="module")
def measured(loaded: LoadedModel) -> Profile:
    options = ProfileOptions(0, 1, 0.5, pause=0.0)
    return profile_edge(loaded.wrapped, loaded.spec.model_id, loaded.args, loaded.kwargs, options)


def test_goodput_is_not_read_off_sizes_that_hardly_differ() -> None:
    small = profile("edge", [Layer(1, 1, 210), Layer(1, 1, 320)], input_bytes=206)
    sizes = probe_sizes(small, None)
    assert sizes == sorted({0, *(cut.wire_bytes for cut in small.cuts), LEAST_PROBED})
    large = profile("edge", [Layer(1, 1, 10 * LEAST_PROBED)])
    assert max(probe_sizes(large, None)) == max(cut.wire_bytes for cut in large.cuts) > LEAST_PROBED


def test_a_file_of_the_same_name_is_another_file(loaded: LoadedModel) -> None:
    known = FileInput(IMAGE.name, ".png", IMAGE.stat().st_size, exactly(7 * MS))
    edge = profile("edge", [Layer(1, 1, 10)], files=(known,))
    assert file_of(edge, str(IMAGE), loaded) == known
    other = replace(edge, files=(replace(known, nbytes=known.nbytes + 1),))
    found = file_of(other, str(IMAGE), loaded)
    assert found is not None and found.nbytes == IMAGE.stat().st_size and found.prepare_ns != known.prepare_ns


def test_a_profile_with_another_codec_is_marked(loaded: LoadedModel, measured: Profile, tmp_path: Path) -> None:
    path = tmp_path / "edge.json"
    profiles.write(measured, path)
    said: list[str] = []
    edge_profile(loaded, SurveySources(edge_profile=str(path)), said.append)
    assert said == []
    edge_profile(loaded, SurveySources(edge_profile=str(path), codec="lz4"), said.append)
    assert len(said) == 1 and "codec raw" in said[0] and "lz4" in said[0]


def test_warnings_of_profiles_are_repeated(loaded: LoadedModel, measured: Profile, tmp_path: Path) -> None:
    path = tmp_path / "edge.json"
    profiles.write(replace(measured, warnings=("2 threads take long",)), path)
    said: list[str] = []
    assert edge_profile(loaded, SurveySources(edge_profile=str(path)), said.append).warnings == ("2 threads take long",)
    assert said == ["warning: edge: 2 threads take long"]


def test_a_profile_of_other_weights_is_refused_with_its_name(
    loaded: LoadedModel, measured: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    profiles.write(replace(measured, model=replace(measured.model, weights_hash="00")), path)
    with pytest.raises(SpecError, match=r"other\.json: .*another weights"):
        edge_profile(loaded, SurveySources(edge_profile=str(path)), lambda text: None)


def test_a_clouds_profile_of_another_machine_than_the_servers_is_marked(measured: Profile) -> None:
    cloud = replace(measured, side="cloud", machine={"id": "a", "name": "a-box", "threads": 2})

    def said(machine: str | None) -> list[str]:
        served = None if machine is None else split_pb2.ModelInfo(machine=machine)
        return _of_another_machine(cloud, measured.model, "here:1", served)

    assert said('{"id": "a", "threads": 2}') == []
    assert "another machine (a-box)" in said('{"id": "b"}')[0]
    assert "threads" in said('{"id": "a", "threads": 4}')[0]
    for silent in (None, "", "[]", "{}", "{", '{"id":' * 100_000):
        assert "does not say on what machine" in said(silent)[0]


def test_a_server_says_on_what_machine_it_runs() -> None:
    with local_server(ModelChoice("digits", threads=1)) as server:
        nothing: Any = SimpleNamespace(model_id="nothing", weights_hash="")
        digits: Any = SimpleNamespace(model_id="digits", weights_hash="of another version")
        reported = json.loads(_served(server, digits, None).machine)
        assert _served(server, nothing, None) is None
    assert reported["id"] == describe(torch.device("cpu"))["id"] and reported["threads"] == 1
