"""A profile survives its file; anything else is refused by name; a profile of something else is refused or marked."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_hooks.errors import Disagreement, SpecError
from shared_hooks.metrics.records import Reading, TensorShape
from shared_hooks.profiling.profile import (
    STAGES,
    CutProfile,
    FileInput,
    LayerProfile,
    ModelIdentity,
    Profile,
    Quartiles,
    check,
    from_json,
    read,
    to_json,
    write,
)

numbers = st.floats(0, 1e15)
sizes = st.integers(0, 1 << 50)
texts = st.text(max_size=12)
quartiles = st.builds(
    lambda values, n: Quartiles(*(sorted(values)[place] for place in (1, 0, 2)), n),
    st.lists(numbers, min_size=3, max_size=3),
    st.integers(0, 1000),
)
readings = st.one_of(
    st.builds(Reading.measured, numbers, texts),
    st.builds(Reading.estimated, numbers, texts),
    st.builds(Reading.unavailable, texts),
)
digests = st.text("0123456789abcdef", max_size=32)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    side = draw(st.sampled_from(["edge", "cloud"]))
    names = draw(st.lists(texts, max_size=3))
    layers = tuple(
        LayerProfile(
            layer_id=number,
            name=name,
            layer_type=draw(texts),
            outputs=tuple(TensorShape("float32", tuple(draw(st.lists(sizes, max_size=3)))) for _ in range(number)),
            output_bytes=draw(sizes),
            frontier_bytes=draw(st.none() | sizes),
            can_split=draw(st.booleans()),
            reason=draw(texts),
            inference_ns=draw(quartiles),
            cpu_ns=draw(st.none() | quartiles),
            energy=draw(readings),
            mean_power=draw(readings),
            memory_allocated=draw(readings),
            memory_peak=draw(readings),
            features=draw(st.dictionaries(texts, numbers, max_size=2)),
        )
        for number, name in enumerate(names)
    )
    cuts = tuple(
        CutProfile(
            layer_id=number,
            name="input" if number < 0 else names[number],
            frontier_bytes=draw(sizes),
            wire_bytes=draw(sizes),
            stages={stage: draw(quartiles) for stage in STAGES[side]},
            energy=draw(readings),
            memory_peak=draw(readings),
            estimated=draw(texts),
            cpu_ns=draw(st.none() | quartiles),
        )
        for number in sorted(draw(st.sets(st.integers(-1, len(names) - 1))))
    )
    outside = draw(numbers)
    return Profile(
        side=side,
        model=ModelIdentity(
            draw(texts), draw(digests), draw(digests), draw(digests), draw(st.none() | st.integers(0, 9))
        ),
        machine={"id": draw(texts), "name": draw(texts), "cpu_quota": draw(st.none() | numbers), "gpus": []},
        created=draw(texts),
        settings={"threads": draw(sizes), "device": "cpu"},
        whole_ns=draw(quartiles),
        outside_ns=Quartiles(-outside, -outside, outside, 3),
        layers=layers,
        cuts=cuts,
        whole_energy=draw(readings),
        idle_power=draw(readings),
        whole_memory_peak=draw(readings),
        weights_bytes=draw(sizes),
        answer_bytes=draw(sizes),
        files=tuple(
            FileInput(draw(texts), ".png", draw(sizes), draw(quartiles)) for _ in range(draw(st.integers(0, 2)))
        ),
        warnings=tuple(draw(st.lists(texts, max_size=1))),
    )


@given(profiles())
def test_round_trip(profile: Profile) -> None:
    text = json.dumps(to_json(profile), allow_nan=False)
    assert from_json(json.loads(text)) == profile
    assert from_json(json.loads(text), profile.side) == profile


@given(profiles(), profiles())
def test_one_side_of_two(one: Profile, other: Profile) -> None:
    both = {
        "edge": to_json(dataclasses.replace(one, side="edge", cuts=())),
        "cloud": to_json(dataclasses.replace(other, side="cloud", cuts=())),
    }
    assert from_json(both, "edge").side == "edge"
    assert from_json(both, "cloud").side == "cloud"
    with pytest.raises(SpecError, match="both sides"):
        from_json(both)
    del both["cloud"]
    assert from_json(both).side == "edge"
    with pytest.raises(SpecError, match="no profile of the cloud, only of the edge"):
        from_json(both, "cloud")


def some(value: float = 1.0) -> Quartiles:
    return Quartiles(value, value, value, 3)


NOTHING = Reading.unavailable("no meter")
LAYER = LayerProfile(
    0,
    "one",
    "Linear",
    (TensorShape("float32", (2, 8)),),
    64,
    64,
    True,
    "",
    some(),
    some(),
    NOTHING,
    NOTHING,
    NOTHING,
    NOTHING,
    {"macs": 128.0},
)
EDGE = Profile(
    side="edge",
    model=ModelIdentity("small", "aa" * 16, "bb" * 16, "cc" * 16),
    machine={"id": "0123", "name": "box", "cpu_quota": None, "threads": 1, "torch": "2.13.0", "device": "cpu"},
    created="2026-01-01T00:00:00+00:00",
    settings={"threads": 1},
    whole_ns=some(10.0),
    outside_ns=some(9.0),
    layers=(LAYER,),
    cuts=(
        CutProfile(-1, "input", 64, 200, {"head": some(), "encode": some()}, NOTHING, NOTHING),
        CutProfile(0, "one", 64, 200, {"head": some(), "encode": some()}, NOTHING, NOTHING, "", some()),
    ),
    whole_energy=NOTHING,
    idle_power=Reading.measured(1.5, "RAPL"),
    whole_memory_peak=NOTHING,
    weights_bytes=256,
    answer_bytes=100,
    files=(FileInput("a.png", ".png", 100, some()),),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be changed."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in children:
        yield (*path, key)
        yield from places(item, (*path, key))


FREE = ("machine", "settings", "features")
"""Objects that may hold anything finite."""
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    -1.5,
    1.5,
    math.nan,
    math.inf,
    10**400,
    "",
    "x" * 100,
    [],
    {},
    [[]],
    {"a": 1},
    "\0\ud800",
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:12])
def test_hostile_values_are_refused_or_read_but_never_a_surprise(value: Any) -> None:
    plain = to_json(EDGE)
    for path in places(plain):
        data = copy.deepcopy(plain)
        inside = data
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value
        try:
            found = from_json(data, "edge", "file.json")
        except SpecError as error:
            assert str(error).startswith("file.json")
        else:
            assert isinstance(found, Profile)
            json.dumps(to_json(found), allow_nan=False)


def test_missing_fields_are_named() -> None:
    plain = to_json(EDGE)
    for path in places(plain):
        if not isinstance(path[-1], str) or path[0] in FREE or "features" in path:
            continue
        data = copy.deepcopy(plain)
        inside = data
        for key in path[:-1]:
            inside = inside[key]
        del inside[path[-1]]
        if path[-1] in ("bare_ns", "codecs", "cpu_ns", "depth", "finish_ns", "frontier_bytes", "value", "warnings"):
            continue  # null says the same
        with pytest.raises(SpecError):
            from_json(data)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("format",), "other", "not a profile"),
        (("version",), 2, "reads 1, found 2"),
        (("side",), "fog", 'edge or cloud, found "fog"'),
        (("warnings",), [3], "expected a list of strings"),
        (
            ("layers", 0, "inference_ns", "median"),
            math.nan,
            "layers[0].inference_ns.median: expected a number of at least 0, found nan",
        ),
        (("whole_ns", "median"), -5.0, "whole_ns.median"),
        (("whole_ns", "q1"), 50.0, "whole_ns: expected q1 <= median <= q3"),
        (("layers", 0, "layer_id"), 4, "layers are in order"),
        (("cuts", 1, "name"), "two", "layer 0 has another name"),
        (("cuts", 1, "layer_id"), 7, "no layer 7"),
        (("cuts", 1, "layer_id"), -1, "another name"),
        (("cuts", 0, "stages", "compute"), {}, "unknown stage 'compute'"),
        (("whole_energy", "value"), 3.0, "unavailable with the value 3.0"),
        (("whole_energy", "status"), "guessed", "measured or estimated or unavailable"),
        (("model", "weights_hash"), "no hex", "hexadecimal"),
        (("layers",), {}, "expected a list"),
        (("machine",), 5, "machine: expected an object, found an integer (5)"),
        (("settings", "threads"), math.inf, "settings.threads: inf"),
    ],
)
def test_the_place_and_the_fault_are_named(path: tuple[Any, ...], value: Any, says: str) -> None:
    data = to_json(EDGE)
    inside: Any = data
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(SpecError) as caught:
        from_json(data)
    assert says in str(caught.value)


@pytest.mark.parametrize("data", [None, [], 3, "text", {}, {"edge": None}, {"edge": 3}, {"format": "isthmus-profile"}])
def test_invalid_profile(data: Any) -> None:
    with pytest.raises(SpecError):
        from_json(data)


def test_the_wrong_side() -> None:
    with pytest.raises(SpecError, match="expected a profile of the cloud, found one of the edge"):
        from_json(to_json(EDGE), "cloud")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "edge.json"
    write(EDGE, path)
    assert read(path) == EDGE
    for content, says in [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "JSON"),
        (b"7", "expected an object"),
    ]:
        path.write_bytes(content)
        with pytest.raises(SpecError, match=says):
            read(path)
    with pytest.raises(SpecError, match="cannot be read"):
        read(tmp_path / "missing.json")
    with pytest.raises(SpecError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(SpecError, match="cannot be written"):
        write(EDGE, tmp_path / "no" / "folder.json")


@pytest.mark.parametrize("name", ["model_id", "weights_hash", "structure_digest", "plan_digest", "depth"])
def test_another_model_is_refused_by_name(name: str) -> None:
    other = dataclasses.replace(EDGE.model, **{name: 1 if name == "depth" else "dd" * 16})
    what = {"model_id": "model", "weights_hash": "weights", "structure_digest": "structure", "plan_digest": "plan"}
    with pytest.raises(Disagreement, match=f"another {what.get(name, name)}"):
        check(EDGE, other)


def test_another_machine_is_marked() -> None:
    assert check(EDGE, EDGE.model, None) == []
    assert check(EDGE, EDGE.model, "0123") == []
    assert check(EDGE, EDGE.model, EDGE.machine) == []
    (warning,) = check(EDGE, EDGE.model, "4567")
    assert "another machine (box)" in warning


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"threads": 4}, "number of threads: 1 then, 4 now"),
        ({"cpu_quota": 0.25}, "CPU quota: none then, 0.25 now"),
        ({"torch": "2.14.0"}, "torch: 2.13.0 then, 2.14.0 now"),
        ({"device": "cuda:0"}, "device"),
    ],
)
def test_other_conditions_are_marked(changed: dict[str, Any], says: str) -> None:
    (warning,) = check(EDGE, EDGE.model, {**EDGE.machine, **changed})
    assert says in warning


def test_depth_of_verbatim_data_is_bounded(tmp_path: Path) -> None:
    data = to_json(EDGE)
    text = json.dumps({**data, "machine": {**data["machine"], "deep": "HERE"}})
    for deep in (40, 400, 900):
        path = tmp_path / "deep.json"
        path.write_text(text.replace('"HERE"', '{"a":' * deep + "1" + "}" * deep))
        with pytest.raises(SpecError):
            read(path)
