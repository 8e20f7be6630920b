"""What a model's digests are made of, and what two sides make of a difference."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import zlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.errors import BadFrame, TooLarge
from shared_hooks.modules import constants
from shared_hooks.modules.manifest import (
    CODE,
    HELD,
    KIND,
    MAX_BYTES,
    MAX_DIFFERENCES,
    MAX_ENTRIES,
    MAX_LINE,
    MAX_NOTES,
    MAX_TEXT,
    OPERATION,
    SET,
    SPARE_BYTES,
    SPARE_ENTRIES,
    TENSOR,
    TIMES,
    USUAL,
    Fact,
    compare,
    decode,
    encode,
)
from tests.zoo import CASES, Case


class Net(nn.Module):
    def __init__(self, eps: float = 1e-5, mode: str = "zeros", slope: float = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1, padding_mode=mode)
        self.norm = nn.BatchNorm2d(2, eps=eps)
        self.slope = slope
        self.path = "/somewhere/else"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(self.norm(self.conv(x)), self.slope)


def facts(model: nn.Module, depth: int | None = None) -> dict[Fact, str]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return WrappedModel(model, depth=depth).manifest()


def test_sides_that_are_alike_have_nothing_to_say() -> None:
    assert compare(facts(Net()), facts(Net())) == compare({}, {})


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Net(eps=1e-3), "norm: eps: client 1e-05, server 0.001"),
        (Net(slope=0.2), "(model): slope: client 0.1, server 0.2"),
        (Net(mode="reflect"), "conv: padding_mode: client 'zeros', server 'reflect'"),
    ],
)
def test_a_number_that_differs_is_named_with_its_module(other: Net, says: str) -> None:
    assert says in compare(facts(Net()), facts(other)).differences


def test_a_depth_is_named() -> None:
    found = compare(facts(Net()), facts(Net(), depth=1)).differences
    assert found == ("(model): depth of layers: client None, server 1",)


def test_a_tensor_is_named_by_shape_or_content() -> None:
    mine, theirs = Net(), Net()
    client = facts(mine)
    server = facts(theirs)
    with torch.no_grad():
        theirs.norm.weight[1] += 1e-3
    server = WrappedModel(theirs).manifest()
    assert compare(client, server).differences == ("weights: other values in norm.weight",)
    wider = facts(nn.Sequential(nn.Linear(2, 3))), facts(nn.Sequential(nn.Linear(3, 3)))
    assert any("0: the tensor weight: client float32 [3, 2] " in text for text in compare(*wider).differences)
    (text,) = compare(
        facts(nn.Sequential(*[nn.Linear(1, 1)] * 3)), _moved(nn.Sequential(*[nn.Linear(1, 1)] * 3))
    ).differences
    assert text == "weights: other values in 0.weight, 0.bias, 1.weight, 1.bias and 2 more"


def _moved(model: nn.Module) -> dict[Fact, str]:
    facts(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    return WrappedModel(model).manifest()


def test_text_of_ones_own_modules_may_be_a_path() -> None:
    model = Net()
    before = facts(model)
    other = Net()
    other.path = "/here"
    assert compare(before, facts(other)).differences == ()


class Newer(nn.BatchNorm2d):
    """As a later release might have it."""

    def __init__(self, number: int, groups: int = 1) -> None:
        super().__init__(number)
        self.groups = groups


Newer.__qualname__ = Newer.__name__ = "BatchNorm2d"
Newer.__module__ = nn.BatchNorm2d.__module__


@pytest.mark.parametrize("swap", [False, True])
def test_attribute_of_one_release_is_a_note_unless_it_may_matter(swap: bool) -> None:
    def both(groups: int) -> tuple[Mapping[Fact, str], Mapping[Fact, str]]:
        found = facts(nn.Sequential(nn.BatchNorm2d(2))), facts(nn.Sequential(Newer(2, groups)))
        return found[::-1] if swap else found

    harmless = compare(*both(1))
    assert harmless.differences == () and [note.split(": client")[0] for note in harmless.notes] == ["0: groups"]
    (text,) = compare(*both(2)).differences
    assert text.startswith("0: groups: ") and "2" in text and "has none" in text


class Scaled(nn.Sequential):
    """Reads what somebody may have set on it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        return out * getattr(self, "scale", 1.0)


class Optional(nn.Module):
    """Holds its constructor's own default, or nothing."""

    def __init__(self, scale: float = 2.0, on: bool = True) -> None:
        super().__init__()
        if on:
            self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, "scale", 1.0)


class Reader(nn.Module):
    """Reads what somebody may have set on a module of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self.inner, "scale", 1.0)


def scaled(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """With a scale on one side alone."""
    if kind is Optional:
        return Optional(), Optional(on=False)
    one, other = kind(), kind()
    getattr(one, "inner", one).scale = 0.5  # type: ignore[union-attr, assignment]
    return one, other


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("kind", [Scaled, Optional, Reader])
def test_attribute_set_by_others_on_one_side_is_a_difference(kind: type[nn.Module], swap: bool) -> None:
    one, other = scaled(kind)
    x = torch.ones(1, 1, 2, 2)
    assert not torch.equal(one(x), other(x))
    sides = WrappedModel(one).manifest(), WrappedModel(other).manifest()
    found = compare(*(sides[::-1] if swap else sides))
    assert found.notes == () and len(found.differences) == 1 and ": scale: " in found.differences[0]


def test_a_model_that_was_wrapped_before_and_a_copy_of_it_have_the_same_facts() -> None:
    model = Net()
    with WrappedModel(model) as first:
        twin = copy.deepcopy(model)
        assert WrappedModel(model).manifest() == first.manifest() == WrappedModel(twin).manifest()
        assert WrappedModel(model).environment() == WrappedModel(twin).environment() == first.environment()


def of_base(factor: int) -> nn.Module:
    """Two models whose own class is the same, and the code or the numbers that it inherits are not."""
    if factor == 2:

        class Base(nn.Module):
            factor = 2

            def helper(self, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def alone(x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @property
            def reported(self) -> float:
                return 2.0

    else:

        class Base(nn.Module):  # type: ignore[no-redef]
            factor = 3

            def helper(self, x: torch.Tensor) -> torch.Tensor:
                return x * 3

            @staticmethod
            def alone(x: torch.Tensor) -> torch.Tensor:
                return x * 3

            @property
            def reported(self) -> float:
                return 3.0

    return Base()


@pytest.mark.parametrize("what", ["factor", "helper", "alone", "reported"])
def test_inherited_methods_are_code(what: str) -> None:
    def made(factor: int) -> nn.Module:
        base: Any = type(of_base(factor))
        kept: Any = type("Base", (nn.Module,), {what: vars(base)[what], "__module__": __name__})

        class Leaf(kept):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                found = getattr(self, what)
                out: torch.Tensor = found(x) if callable(found) else x * found
                return out

        return Leaf()

    one, other, same = made(2), made(3), made(2)
    x = torch.ones(2)
    assert torch.equal(one(x), same(x)) and not torch.equal(one(x), other(x))
    digests = [WrappedModel(model).environment()["model_code"] for model in (one, other, same)]
    assert digests[0] == digests[2] != digests[1]
    (reported,) = compare(WrappedModel(one).manifest(), WrappedModel(other).manifest()).differences
    assert "code of " in reported


def slope(factor: float) -> Any:
    return lambda x: x * factor


ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "lambdas": (
        lambda x: x * 2,
        lambda x: x * 3,
    ),
    "closures": (slope(2.0), slope(3.0)),
    "partials": (functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=3)),
    "torch's": (nn.functional.relu, nn.functional.gelu),
}


@pytest.mark.parametrize("what", ACTIVATIONS)
def test_functions_that_a_module_of_torch_was_given_are_compared(what: str) -> None:
    def made(activation: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation=activation))

    one, other = ACTIVATIONS[what]
    x = torch.ones(1, 3, 4) * torch.arange(4)
    assert not torch.equal(made(one)(x), made(other)(x))
    mine, theirs, again = (WrappedModel(made(activation)).manifest() for activation in (one, other, one))
    assert mine == again
    assert any(": activation: " in line for line in compare(mine, theirs).differences)


OWN_NAMES = ["scale", "bias", "groups", "weight", "num_features", "dtype", "device", "training_steps", "eps", "mode"]
KINDS: list[type[nn.Module]] = [nn.Identity, nn.Sequential, nn.BatchNorm2d, nn.LSTM, Scaled, Optional, Newer]


@given(
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(OWN_NAMES),
    value=st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | st.just(1e-05),
)
def test_a_note_is_what_torchs_own_constructor_keeps_by_default(kind: type[nn.Module], name: str, value: Any) -> None:
    """Whatever is set on a module of whatever class: no other attribute of one side alone is a note."""
    model: Any = kind() if not issubclass(kind, (nn.BatchNorm2d, nn.LSTM)) else kind(2, 2)
    before = WrappedModel(nn.Sequential(model)).manifest()
    if isinstance(getattr(model, name, 0), torch.Tensor):
        return
    without = {fact: reported for fact, reported in before.items() if fact[1:] != ("0", name)}
    setattr(model, name, value)
    found = compare(WrappedModel(nn.Sequential(model)).manifest(), without)
    usual = (kind, name, repr(value)) in ((nn.BatchNorm2d, "eps", "1e-05"), (Newer, "groups", "1"))
    assert bool(found.notes) == usual and bool(found.differences) != usual


TORCHS: list[Any] = [
    lambda: nn.Conv2d(2, 2, 1),
    lambda: nn.BatchNorm2d(2),
    lambda: nn.LSTM(2, 2),
    lambda: nn.TransformerEncoderLayer(4, 2, 8),
    lambda: nn.Upsample(scale_factor=2),
]


@pytest.mark.parametrize("build", TORCHS, ids=lambda build: type(build()).__name__)
def test_no_attribute_goes_missing_in_silence(build: Any) -> None:
    """One that torch's constructor has by default is a note, every other one a difference."""
    found = WrappedModel(nn.Sequential(build())).manifest()
    defaults = {name: one.default for name, one in inspect.signature(type(build())).parameters.items()}
    for fact in found:
        if fact[0] in (SET, USUAL):
            reported = compare(found, {other: value for other, value in found.items() if other != fact})
            assert len(reported.notes) == (fact[0] == USUAL) and len(reported.differences) == (fact[0] == SET)
            assert (
                fact[0] == SET
                or fact[1] != "0"
                or ast.literal_eval(found[fact])
                in (
                    defaults[fact[2]],
                    (defaults[fact[2]],) * 2,
                )
            )


def test_of_operations_the_first_that_differs() -> None:
    def plan(*names: str) -> dict[Fact, str]:
        return {(OPERATION, str(number), ""): name for number, name in enumerate(names)}

    assert compare(plan("linear"), plan()) == compare({}, {}), "a side without an example has no plan"
    found = compare(plan("linear", "relu", "add"), plan("linear", "gelu", "relu", "add"))
    assert found.differences == ("operation 1 of the plan: client relu, server gelu",)


def test_code_is_named_by_its_class() -> None:
    found = compare({(CODE, "Net", ""): "a"}, {(CODE, "Net", ""): "b"})
    assert found.differences == ("code of Net: client a, server b",)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_model_has_one_that_survives_the_wire(case: Case) -> None:
    found = WrappedModel(case.build()).manifest()
    data = encode(found)
    assert data is not None and decode(data) == found
    assert compare(found, WrappedModel(case.build()).manifest()).differences == ()


TEXT = st.text(st.characters(blacklist_characters="\x1e\x1f", blacklist_categories=("Cs",)), max_size=20)
KINDS_OF_FACTS = st.sampled_from([SET, USUAL, CODE, KIND, TENSOR])
FACTS = st.dictionaries(st.tuples(KINDS_OF_FACTS, TEXT, TEXT), TEXT, min_size=1, max_size=12)


@given(FACTS, FACTS, st.booleans())
def test_every_difference_has_a_line_and_bytes_come_back(
    one: dict[Fact, str], other: dict[Fact, str], alike: bool
) -> None:
    if alike:
        other = {**one, **dict(list(other.items())[:1])}
    data = encode(one)
    assert data is not None and decode(data) == one
    found = compare(one, other)
    assert all(text.isprintable() for text in (*found.differences, *found.notes))
    assert compare(one, one) == compare({}, {})

    def by_place(facts: Mapping[Fact, str]) -> dict[Fact, str]:
        return {
            ("attribute" if kind in (SET, USUAL) else kind, *place): reported
            for (kind, *place), reported in facts.items()
        }

    if by_place(one) != by_place(other):
        assert found.differences or found.notes
        usual_alone = [fact for fact in one.keys() ^ other.keys() if fact[0] == USUAL]
        assert found.differences or usual_alone


def test_a_strangers_facts_make_no_more_of_it_than_the_own_ones() -> None:
    own = WrappedModel(Net()).manifest()
    many: dict[Fact, str] = {(SET, str(number), "x" * 20): "" for number in range(TIMES * len(own) + SPARE_ENTRIES + 1)}
    large: dict[Fact, str] = {(SET, "a", ""): "x" * (SPARE_BYTES + 100_000)}
    for facts in (many, large):
        data = encode(facts)
        assert data is not None
        assert decode(data)
        with pytest.raises(TooLarge):
            decode(data, own)
    assert decode(encode(own) or b"", {}) == own, "a small model's facts fit the spare room"


@pytest.mark.parametrize("sort", [SET, USUAL])
def test_reports_are_bounded_before_they_are_built(sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the names and values of a stranger, and however many."""
    made: list[int] = []

    def counted(text: str) -> str:
        made.append(len(text))
        return text

    monkeypatch.setattr("shared_hooks.modules.manifest.printable", counted)
    found = compare({(sort, f"{number}{'x' * 999}", "y" * 999): "z" * 9999 for number in range(2000)}, {})
    reported = [*found.differences, *found.notes]
    assert len(reported) == len(made) == (MAX_DIFFERENCES + 1 if sort == SET else MAX_NOTES)
    assert max(made) <= MAX_LINE


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", BadFrame),
        (b"junk", BadFrame),
        (zlib.compress(b"\xff\xfe"), BadFrame),
        (zlib.compress(b"set\x1fa"), BadFrame),
        (zlib.compress(b"other\x1fa\x1fb\x1fc"), BadFrame),
        (zlib.compress(b"set\x1fa\x1fb\x1fc\x1fd"), BadFrame),
        (zlib.compress(b"made\x1fa\x1fb\x1fc"), BadFrame),
        (zlib.compress(bytes(MAX_TEXT + 1)), TooLarge),
        (zlib.compress(b"\x1e" * MAX_ENTRIES), TooLarge),
        (bytes(MAX_BYTES + 1), TooLarge),
    ],
    ids=range(10),
)
def test_hostile_bytes(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode(data)


def test_unsendable_values_are_not_sent() -> None:
    assert encode({(SET, "a\x1e", "b"): "c"}) is None
    assert encode({(SET, str(number), ""): "" for number in range(MAX_ENTRIES + 1)}) is None
    data = encode({(SET, "a", ""): "\u20ac" * (MAX_TEXT // 3 - 3)})
    assert data is not None and decode(data), "bytes are counted, as where it is read"
    assert encode({(SET, "a", ""): "\u20ac" * (MAX_TEXT // 3)}) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_model_has_digests_that_two_instances_share(case: Case) -> None:
    one, other = WrappedModel(case.build()), WrappedModel(case.build())
    assert one.weights_hash() == other.weights_hash() and one.structure_digest() == other.structure_digest()
    assert one.environment() == other.environment()


class Wrapping(nn.Module):
    """Wraps a method of torch's, and is wrapped by torch, as models of libraries do."""

    @functools.wraps(nn.Module.cuda)
    def cuda(self, device: Any = None) -> Any:
        return super().cuda(device)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_wrapper_attributes_of_torch_are_not_model_code() -> None:
    texts = "\n".join(constants._source(Wrapping))
    assert inspect.getsource(nn.Module.cuda) not in texts
    assert "return super().cuda(device)" in texts and "return 2 * x" in texts


class Remembering(nn.Module):
    """Keeps on the class what it once worked out, as transformers' models do."""

    _known: bool | None = None
    factor = 2

    @classmethod
    def knows(cls) -> bool:
        cls._known = True
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x if self.knows() else x


def test_caches_of_a_class_are_not_code() -> None:
    constants._source_of_class.cache_clear()
    before = constants._source(Remembering)
    Remembering()(torch.ones(2))
    constants._source_of_class.cache_clear()
    assert constants._source(Remembering) == before and "factor = 2" in before


def test_functions_that_torchs_modules_hold_are_reported_without_addresses() -> None:
    def unfinished() -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            return later(x)  # bound below, after the module was looked at

        layer = nn.TransformerEncoderLayer(4, 2, 8, activation=call)
        found = WrappedModel(layer).manifest()
        later = torch.relu
        return found, later

    unfinished()
    held = [nn.TransformerEncoderLayer(4, 2, 8, activation=functools.partial(slope(2), object())) for _ in range(2)]
    assert "0x" not in constants._function(held[0].activation)
    one, other = (constants._function(layer.activation) for layer in held)
    assert one == other
    assert constants._function(functools.partial(slope(2), k=2)) != constants._function(
        functools.partial(slope(2), k=3)
    )


class Scaled(nn.Linear):
    """Sets one number itself, and reads two others."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale, self.calls, self.unread, self.nothing = 1.0, 0, 0, float("nan")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.scale if self.nothing else x


def test_numbers_that_somebody_set_later_are_named_and_those_of_the_models_code_are_not() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scaled()).eval()
    with WrappedModel(model) as wrapped:
        model[1].calls, model[1].unread = 3, 4
        assert wrapped.other_numbers(model) == []
        model[1].scale = 2.0
        assert wrapped.other_numbers(model) == ["1.scale"]
        model[1].scale = 1.0
        assert wrapped.other_numbers(model) == []


class Settings:
    """An object that a model is configured by, with another one in it."""

    def __init__(self, scale: Any = 2.0) -> None:
        self.scale, self.unread, self.text = scale, 1, "text"
        self.inner = SimpleNamespace(shift=0.5)
        self.table = {"factor": 3.0, 4: 5.0}
        self.owner = self


class Configured(nn.Linear):
    """Reads an object that it holds, one inside that, and a dictionary."""

    def __init__(self, settings: Any) -> None:
        super().__init__(4, 4)
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x) * self.settings.table["factor"] + self.settings.inner.shift
        return found if self.settings.scale is None else found * self.settings.scale


def changed(model: nn.Module, way: str, value: Any) -> nn.Module:
    """``model``, where ``value`` lies at the end of ``way``."""
    first, *names, last = way.split(".")
    held: Any = getattr(model, first)
    for name in names:
        held = held[name] if isinstance(held, dict) else getattr(held, name)
    if isinstance(held, dict):
        held[last] = value
    else:
        setattr(held, last, value)
    return model


WAYS = {
    "settings.scale": (2.0, 3.0),
    "settings.inner.shift": (0.5, 1.5),
    "settings.table.factor": (3.0, -3.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_numbers_in_objects_are_compared(way: str) -> None:
    before, after = WAYS[way]
    other = changed(Configured(Settings()), way, after)
    assert WrappedModel(other).environment() != WrappedModel(Configured(Settings())).environment()
    found = compare(facts(Configured(Settings())), facts(other))
    assert found.differences == (f"(model): {way}: client {before}, server {after}",)


def test_a_number_in_the_place_of_none_is_a_difference_and_one_that_no_code_reads_is_none() -> None:
    none = facts(Configured(Settings(None)))
    assert compare(none, facts(Configured(Settings()))).differences == (
        "(model): settings.scale: client None, server 2.0",
    )
    found = compare(facts(changed(Configured(Settings()), "settings.unread", 7)), facts(Configured(Settings())))
    assert found == compare({}, {})
    one_sided = facts(changed(Configured(Settings()), "settings.more", 7))
    assert compare(one_sided, facts(Configured(Settings()))).differences == ()


@pytest.mark.parametrize("way", WAYS)
def test_numbers_in_objects_that_somebody_set_later(way: str) -> None:
    before, after = WAYS[way]
    model = Configured(Settings())
    with WrappedModel(model) as wrapped:
        changed(model, "settings.unread", 9)
        assert wrapped.other_numbers(model) == []
        changed(model, way, after)
        assert wrapped.other_numbers(model) == [way]
        changed(model, way, before)
        assert wrapped.other_numbers(model) == []


class Plain(nn.Module):
    """Holds whatever it is given."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


@given(st.recursive(st.integers() | st.text() | st.none(), lambda one: st.dictionaries(st.text(), one) | st.lists(one)))
def test_any_attribute_can_be_sent(held: Any) -> None:
    found = WrappedModel(Plain(held)).manifest()
    data = encode(found)
    assert data is None or decode(data) == found


def held_by_code(around: float = 2.0, default: float = 3.0, beside: float = 4.0) -> nn.Module:
    """Numbers in a variable around a class, in a default of an argument, and in a function that another one calls."""
    space: dict[str, Any] = {"__name__": "elsewhere", "BESIDE": beside, "COUNT": 0, "torch": torch}
    code = "def beside(x):\n    global COUNT\n    COUNT += 1\n    return x * BESIDE if COUNT else x\n"
    exec(compile(code, "/elsewhere.py", "exec"), space)
    outside = space["beside"]

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor, times: float = default) -> torch.Tensor:
            found: torch.Tensor = outside(super().forward(x) * around * times)
            return found

    model = Model(4, 4)
    model.space = space
    return model


@pytest.mark.parametrize(
    ("other", "place"),
    [
        ({"around": 5.0}, "around of held_by_code.<locals>.Model.forward: client 2.0, server 5.0"),
        ({"default": 5.0}, "held_by_code.<locals>.Model.forward(times): client 3.0, server 5.0"),
        ({"beside": 5.0}, "global BESIDE: client 4.0, server 5.0"),
    ],
)
def test_numbers_that_code_holds_are_compared(other: dict[str, float], place: str) -> None:
    assert compare(facts(held_by_code()), facts(held_by_code())).differences == ()
    assert compare(facts(held_by_code()), facts(held_by_code(**other))).differences == (f"(model): {place}",)


def test_a_number_in_the_code_of_one_side_alone_is_a_note() -> None:
    """What is a script here may be installed there, and of libraries none is looked at."""
    mine = facts(held_by_code())
    theirs = {fact: text for fact, text in mine.items() if fact[0] != HELD}
    found = compare(mine, theirs)
    assert found.differences == () and len(found.notes) == 3


def test_functions_that_hold_each_other_are_looked_into() -> None:
    def one(x: torch.Tensor, n: int = 1) -> torch.Tensor:
        return other(x, n - 1) if n else x

    def other(x: torch.Tensor, n: int) -> torch.Tensor:
        return one(x, n)

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return one(super().forward(x))

    assert any(fact[2].endswith("one(n)") for fact in facts(Model(4, 4)))


class Chooses(nn.Module):
    """Does what a text and a function say; keeps a path and a device, too."""

    def __init__(self, mode: str = "add", function: Any = torch.relu, path: str = "/a/b", device: str = "cpu") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mode, self.function, self.path, self.device = mode, function, path, device
        self.settings = SimpleNamespace(kind=mode, name="one")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.path and self.device
        x = self.linear(x)
        x = x + 1 if self.mode == "add" else x * 2
        found: torch.Tensor = self.function(x if self.settings.kind == "add" else -x)
        return found


def times(n: float) -> Any:
    return lambda x: x * n


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({}, {"mode": "mul"}, ["mode", "settings.kind"]),
        ({}, {"function": torch.tanh}, ["function"]),
        ({"function": times(2)}, {"function": times(3)}, ["function", "n of times.<locals>.<lambda>"]),
        ({}, {"path": "c", "device": "cuda:1"}, []),
    ],
)
def test_words_and_functions_of_ones_own_modules(one: dict[str, Any], other: dict[str, Any], names: list[str]) -> None:
    found = compare(facts(Chooses(**one)), facts(Chooses(**other)))
    assert [line.split(": ")[1] for line in found.differences] == names


def test_a_word_of_one_side_alone_or_that_no_code_reads_is_no_difference() -> None:
    """It may be a path on the other side."""
    model = Chooses()
    model.settings.name = "two"
    model.mode = "/somewhere/add"
    found = compare(facts(model), facts(Chooses()))
    assert found.differences == ()
    assert sorted(line.split(": ")[1] for line in found.notes) == ["mode"]


def test_replaced_method_is_a_difference() -> None:
    model = Chooses()
    model.forward = lambda x: x  # type: ignore[method-assign]
    assert any("forward" in line for line in compare(facts(model), facts(Chooses())).differences)


def test_a_class_that_was_changed_has_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts(Chooses())
    monkeypatch.setattr(Chooses, "forward", lambda self, x: x)
    assert any(line.startswith("code of Chooses") for line in compare(facts(Chooses()), before).differences)


def test_hooks_that_one_side_has_are_a_difference() -> None:
    model = Chooses()
    model.register_forward_hook(lambda *_: None)
    found = compare(facts(model), facts(Chooses())).differences
    assert len(found) == 1 and "forward hooks" in found[0]


def test_names_that_meet_are_no_trouble() -> None:
    model = Plain({"x.y": 1, "x": {"y": "word"}})
    assert constants.attributes(model)[""]
