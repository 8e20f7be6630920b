"""Two sides whose models hold other constants, be they in sets, slots, enumerations or lists of objects."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import fractions
import functools
import importlib.util
import operator
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.modules.manifest import Manifest, compare

Row = collections.namedtuple("Row", ["first", "second"])


def nested(depth: int, value: Any) -> Any:
    return {"a": nested(depth - 1, value)} if depth else value


class Mode(enum.Enum):
    MEAN = 2.0
    SUM = 3.0


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


@dataclasses.dataclass(frozen=True)
class Stage:
    scale: float


class Factor:
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def __call__(self, value: float) -> float:
        return value * float(self.scale)

    def __getitem__(self, _: str) -> Any:
        return self.scale

    def times(self, value: float) -> float:
        return value * float(self.scale)


def class_with(scale: float) -> type:
    return type("Settings", (type("Base", (), {"scale": scale}),), {})


def linear(weight: float) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, weight)
    return made


def of_weight(held: Any) -> float:
    return float(held.weight.detach())


def chain(*steps: Callable[[float], float]) -> Callable[[float], float]:
    return lambda value: functools.reduce(lambda found, step: step(found), steps, value)


class Holds(nn.Module):
    def __init__(self, held: Any, use: Callable[[Any], float]) -> None:
        super().__init__()
        self.a, self.b, self.held, self.use = nn.Linear(4, 4), nn.Linear(4, 4), held, use

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x)) * self.use(self.held)
        return found


HELD: dict[str, tuple[Callable[[float], Any], Callable[[Any], float]]] = {
    "NumPy's number": (np.float64, float),
    "NumPy's numbers": (lambda n: [np.float32(n)], lambda held: float(held[0])),
    "complex": (complex, lambda held: held.real),
    "fraction": (fractions.Fraction, float),
    "range": (lambda n: range(int(n)), len),
    "slice": (lambda n: slice(int(n)), lambda held: held.stop),
    "bytes": (lambda n: bytes([int(n)]), lambda held: held[0]),
    "frozen set": (lambda n: frozenset([n]), lambda held: 2.0 if 2.0 in held else 3.0),
    "enumeration": (Mode, lambda held: 2.0 if held is Mode.MEAN else 3.0),
    "dtype": (lambda n: torch.float32 if n == 2 else torch.float64, lambda held: float(held.itemsize)),
    "class": (lambda n: Slots if n == 2 else Stage, lambda held: held(2.0).scale if held is Slots else 3.0),
    "slots": (Slots, lambda held: held.scale),
    "objects in a list": (lambda n: [Stage(1.0), Stage(n)], lambda held: held[1].scale),
    "dictionary by number": (lambda n: {7: n}, lambda held: held[7]),
    "dictionary that nobody writes to": (lambda n: types.MappingProxyType({"scale": n}), lambda held: held["scale"]),
    "getter": (lambda n: operator.itemgetter(int(n)), lambda held: held([0, 1, 2, 3])),
    "method of a dictionary": (lambda n: {"scale": n}.get, lambda held: held("scale")),
    "partial": (lambda n: functools.partial(float, n), lambda held: held()),
    "class with a setting": (class_with, lambda held: held.scale),
    "object of such a class": (lambda n: class_with(n)(), lambda held: held.scale),
    "object that is called": (Factor, lambda held: held(1.0)),
    "objects that are called": (lambda n: [Factor(n)], lambda held: held[0](1.0)),
    "bound method": (lambda n: Factor(n).times, lambda held: held(1.0)),
    "object with elements": (Factor, lambda held: held["scale"]),
    "functions in a closure": (lambda n: chain(Factor(n), Factor(2.0)), lambda held: held(1.0)),
    "method by name": (lambda n: operator.methodcaller("__mul__", n), lambda held: held(1.0)),
    "text and number": (lambda n: ("scale", n), lambda held: held[1]),
    "tuples in a list": (lambda n: [("pool",), ("scale", n)], lambda held: held[1][1]),
    "named tuples": (lambda n: Row(Row(n, "a"), None), lambda held: held.first.first),
    "pattern": (lambda n: f"b (h w) -> b h w {n}", lambda held: float(held.split()[-1])),
    "number as a text": (str, float),
    "dtypes in a list": (lambda n: [torch.float32 if n == 2 else torch.float64], lambda held: float(held[0].itemsize)),
    "dictionary by pair": (lambda n: {(0, "a"): n}, lambda held: held[0, "a"]),
    "dictionary by type": (lambda n: {nn.Linear: n}, lambda held: held[nn.Linear]),
    "dictionary six deep": (lambda n: nested(6, n), lambda held: functools.reduce(lambda d, _: d["a"], range(6), held)),
    "large dictionary": (lambda n: {str(one): n if one == 77 else 1.0 for one in range(99)}, lambda held: held["77"]),
    "dictionaries in line": (lambda n: collections.ChainMap({}, {"a": n}), lambda held: held["a"]),
    "array": (lambda n: array.array("d", [n]), lambda held: held[0]),
    "deque": (lambda n: collections.deque([n, "a"]), lambda held: held[0]),
    "bytes that may change": (lambda n: bytearray([int(n)]), lambda held: held[0]),
    "number of a class of its own": (lambda n: type("Own", (float,), {})(n), float),
    "module in a list": (lambda n: [linear(n)], lambda held: of_weight(held[0])),
    "module in an object": (lambda n: Factor(linear(n)), lambda held: of_weight(held.scale)),
    "module in a function": (lambda n: functools.partial(of_weight, linear(n)), lambda held: held()),
    "setting of a module in a list": (lambda n: [nn.LeakyReLU(n)], lambda held: held[0].negative_slope),
}  # fmt: skip


def seen(one: nn.Module, other: nn.Module) -> tuple[str, ...]:
    x = torch.ones(1, 4)
    edge, cloud = WrappedModel(one.eval()), WrappedModel(other.eval())
    edge.plan(x), cloud.plan(x)
    return compare(edge.manifest(), cloud.manifest()).differences


def holding(name: str, number: float) -> nn.Module:
    torch.manual_seed(0)
    make, use = HELD[name]
    return Holds(make(number), use)


@pytest.mark.parametrize("name", HELD)
def test_another_one_is_named(name: str) -> None:
    line, *_ = seen(holding(name, 2.0), holding(name, 3.0))
    assert "held" in line


@pytest.mark.parametrize("name", HELD)
def test_the_same_is_none(name: str) -> None:
    assert seen(holding(name, 2.0), holding(name, 2.0)) == ()


def test_of_a_parameter() -> None:
    def scaled(number: float) -> nn.Module:
        torch.manual_seed(0)
        model = Holds(None, lambda _: 1.0)
        model.use = lambda _: model.a.weight.scale
        model.a.weight.scale = number  # type: ignore[assignment]
        return model

    (line,) = seen(scaled(2.0), scaled(3.0))
    assert "scale" in line


class Skips(nn.Module):
    """Looks into a set that nobody adds to."""

    def __init__(self, skipped: set[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.skipped = nn.Linear(4, 4), nn.Linear(4, 4), skipped

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x if 1 in self.skipped else self.b(x)


class Settings:
    def __init__(self, width: int) -> None:
        self.width = width

    @property
    def scale(self) -> float:
        return self.width**-0.5


class Scales(nn.Module):
    """What decides is read in a property of the object alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.settings = nn.Linear(4, 4), nn.Linear(4, 4), Settings(width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x) * self.settings.scale)
        return found


def test_of_a_set_and_of_what_an_objects_own_code_reads() -> None:
    assert "skipped" in " ".join(seen(Skips({1}), Skips({2})))
    assert seen(Skips({1, 3}), Skips({3, 1})) == ()
    assert "width" in " ".join(seen(Scales(4), Scales(9)))
    assert seen(Scales(4), Scales(4)) == ()


class Notes(nn.Module):
    """A set that its forward adds to is no setting: one side has run before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.sizes = nn.Linear(4, 4), nn.Linear(4, 4), set[int]()
        self.rows = {0: 1}

    def forward(self, x: Tensor) -> Tensor:
        self.rows[0] = len(x)
        if len(x) not in self.sizes:
            self.sizes.add(len(x))
        found: Tensor = self.b(self.a(x))
        return found


class ByIdentity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        FACTOR_OF[id(self)] = 2.0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x)) * FACTOR_OF[id(self)]
        return found


FACTOR_OF: dict[int, float] = {}


def test_a_key_that_is_an_objects_identity_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_side() -> Manifest:
        monkeypatch.setattr(sys.modules[__name__], "FACTOR_OF", {})
        torch.manual_seed(0)
        kept.append(wrapped := WrappedModel(ByIdentity().eval()))
        wrapped.plan(torch.ones(1, 4))
        return wrapped.manifest()

    kept: list[WrappedModel] = []
    assert compare(one_side(), one_side()).differences == ()


def test_values_left_by_runs_are_no_constants() -> None:
    torch.manual_seed(0)
    one = Notes()
    torch.manual_seed(0)
    other = Notes()
    one(torch.ones(3, 4))
    assert seen(one, other) == ()


class Chooses(nn.Module):
    """Which entry it takes, its code does not say."""

    def __init__(self, factors: dict[str, float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.factors, self.size = nn.Linear(4, 4), nn.Linear(4, 4), factors, "small"

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x)) * self.factors[self.size] * FACTORS[self.size]
        return found


FACTORS = {"small": 2.0}


def test_of_an_entry_that_a_setting_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "factors.small" in " ".join(seen(Chooses({"small": 2.0}), Chooses({"small": 3.0})))
    x = torch.ones(1, 4)
    edge = WrappedModel(Chooses({"small": 2.0}).eval())
    edge.plan(x)
    monkeypatch.setitem(FACTORS, "small", 3.0)
    cloud = WrappedModel(Chooses({"small": 2.0}).eval())
    cloud.plan(x)
    assert "FACTORS" in " ".join(compare(edge.manifest(), cloud.manifest()).differences)


def shifting(by: Tensor) -> Callable[..., Tensor]:
    return lambda module, inputs, output: output + by


def test_of_two_functions_of_one_name() -> None:
    def hooked(first: float, second: float) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer, by in zip(model, (first, second), strict=True):
            layer.register_forward_hook(shifting(torch.tensor(by)))
        return model

    assert seen(hooked(1.0, 2.0), hooked(1.0, 2.0)) == ()
    assert "by of" in " ".join(seen(hooked(1.0, 2.0), hooked(3.0, 2.0)))
    assert "by of" in " ".join(seen(hooked(1.0, 2.0), hooked(1.0, 3.0)))


SETTINGS = Settings(4)
STEPS = [0.5, 2.0]
MEAN = torch.tensor([0.25, 0.5])
SEEN: dict[str, int] = {}


def note(rows: int) -> None:
    SEEN["rows"] = SEEN.get("rows", 0) + rows


def scaling(settings: Settings) -> Callable[..., Tensor]:
    return lambda module, inputs, output: output * settings.scale


class Globals(nn.Module):
    """What it computes with lies around its code."""

    table: dict[str, float] = {"scale": 2.0}  # noqa: RUF012

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.register_forward_hook(scaling(settings))

    def forward(self, x: Tensor) -> Tensor:
        note(len(x))
        found: Tensor = self.b(self.a(x)) * SETTINGS.scale * STEPS[1] * MEAN[1] * self.table["scale"]
        return found


@pytest.mark.parametrize(
    ("where", "name", "other"),
    [
        ("global", "SETTINGS", Settings(9)),
        ("global", "STEPS", [0.5, 3.0]),
        ("global", "MEAN", torch.tensor([0.25, 1])),
        ("class", "table", {"scale": 3.0}),
        ("hook", "settings", Settings(9)),
        ("runs", "SEEN", {"rows": 12}),
    ],
)
def test_of_what_lies_around_the_code(where: str, name: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = WrappedModel(Globals(Settings(4)).eval())
    edge.plan(torch.ones(1, 4))
    if where == "class":
        monkeypatch.setattr(Globals, name, other)
    elif where != "hook":
        monkeypatch.setitem(globals(), name, other)
    cloud = WrappedModel(Globals(other if where == "hook" else Settings(4)).eval())
    cloud.plan(torch.ones(1, 4))
    found = compare(edge.manifest(), cloud.manifest()).differences
    if where == "runs":  # what its own code writes to is no setting
        assert found == ()
    else:
        assert name in " ".join(found)


FILE = """
import enum, functools, os, types, weakref
import torch
from torch import nn

{around}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        {held}

    def forward(self, x):
        return self.b(self.a(x)) * ({use})
"""
AROUND = {
    "class": ("class C: scale = N", "C.scale"),
    "class in a class": ("class C:\n    class D: scale = N", "C.D.scale"),
    "base": ("class B: scale = N\nclass C(B): pass", "C.scale"),
    "module": ("m = types.ModuleType('m')\nm.scale = N", "m.scale"),
    "enumeration": ("class E(enum.Enum):\n    SCALE = N", "E.SCALE.value"),
    "default of a static method": ("class C:\n    @staticmethod\n    def f(n=N): return n", "C.f()"),
    "object that is called": (
        "class C:\n    def __init__(self): self.n = N\n    def __call__(self): return self.n\nc = C()",
        "c()",
    ),
    "partial": ("p = functools.partial(float, N)", "p()"),
    "module with weights": ("m = nn.Linear(1, 1, bias=False)\nnn.init.constant_(m.weight, N)", "m.weight.item()"),
    "attribute of a function": ("def f(): return f.n\nf.n = N", "f()"),
    "metaclass": ("class T(type): n = N\nclass C(metaclass=T): pass", "C.n"),
    "descriptor": (
        "class D:\n    def __init__(self, n): self.n = n\n    def __get__(self, *_): return self.n\nclass C: d = D(N)",
        "self.held.d",
        "C()",
    ),
    "weak reference": ("class C: pass\nc = C()\nc.n = N\nr = weakref.ref(c)", "r().n"),
    "text of a function": ("def f(): return N", "f()"),
    "text of what it calls": ("def g(): return N\ndef f(): return g()", "f()"),
    "text of what a decorator makes": (
        "def d(f):\n    def w(): return f() * N\n    return w\n@d\ndef f(): return 1",
        "f()",
    ),
    "text of a registered one": ("R = {}\ndef r(f): R['f'] = f\n@r\ndef f(): return N", "R['f']()"),
    "text of a held object's method": ("class C:\n    def f(self): return N", "self.held.f()", "C()"),
    "text of a property": ("class C:\n    @functools.cached_property\n    def n(self): return N", "self.held.n", "C()"),
    "text of an autograd function": (
        "class F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, n): return n * N",
        "F.apply(torch.ones(1))",
    ),
}  # fmt: skip


def from_file(folder: Path, around: str, use: str, held: str = "") -> nn.Module:
    folder.mkdir()
    (folder / "around.py").write_text(FILE.format(around=around, use=use, held=f"self.held = {held}" if held else ""))
    spec = importlib.util.spec_from_file_location("around", folder / "around.py")
    assert spec is not None and spec.loader is not None
    sys.modules["around"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["around"])
    made: nn.Module = sys.modules["around"].Model()
    return made


@pytest.mark.parametrize("name", AROUND)
def test_of_another_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "around", None)  # put back at the end
    around, *rest = AROUND[name]
    one, same, other = (
        from_file(tmp_path / str(number), around.replace("N", value), *rest)
        for number, value in enumerate(("2.0", "2.0", "3.0"))
    )
    assert not torch.equal(one(torch.ones(1, 4)), other(torch.ones(1, 4)))
    assert seen(one, same) == ()
    assert seen(one, other) != ()


def test_a_function_that_no_forward_loads_may_be_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scripts that share a model's code, and a name of something else."""
    monkeypatch.setitem(sys.modules, "around", None)
    one, other = (from_file(tmp_path / str(number), f"def size(): return {number}", "x.size(0)") for number in range(2))
    assert seen(one, other) == ()


def test_machine_properties_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "around", None)
    use = "2.0 if C.device and C.folder and C.release and not C.has_gpu else 2.0"
    one, other = (
        from_file(
            tmp_path / device,
            f"class C: device, has_gpu, folder, release = '{device}', {gpu}, '/{device}', '2.1{gpu:d}.0+{device}'",
            use,
        )
        for device, gpu in (("cpu", False), ("cuda", True))
    )
    assert seen(one, other) == ()


def test_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "around", None)
    use = "float(os.environ.get('MODEL_SCALE', '1')) * len(os.environ.get('HOME', ''))"

    def side(name: str, scale: str | None) -> WrappedModel:
        monkeypatch.delenv("MODEL_SCALE", raising=False)
        if scale is not None:
            monkeypatch.setenv("MODEL_SCALE", scale)
        monkeypatch.setenv("HOME", f"/{name}")
        made = WrappedModel(from_file(tmp_path / name, "", use).eval())
        made.plan(torch.ones(1, 4))
        return made

    sides = [side(*one).manifest() for one in (("a", "2"), ("b", "3"), ("c", None), ("d", "2"))]
    assert compare(sides[0], sides[3]).differences == ()
    assert all("MODEL_SCALE" in " ".join(compare(sides[0], one).differences) for one in sides[1:3])


def test_lists_and_dictionaries_that_hold_themselves() -> None:
    class Rings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.ring = nn.Linear(4, 4), nn.Linear(4, 4), [1.0]
            self.ring.append(self.ring)  # type: ignore[arg-type]
            self.held = {"ring": self.ring, "model": [self]}

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.b(self.a(x)) * self.ring[0] * len(self.held)
            return found

    assert seen(Rings(), Rings()) == ()


def test_counters_of_a_class_or_module_are_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "around", None)
    around = (
        "class C: seen = {}\nm = types.ModuleType('m')\nm.sizes = []\n"
        "def f(x):\n    C.seen[len(x)] = C.seen.get(len(x), 0) + 1\n    m.sizes.append(len(x))\n    return 2.0"
    )
    one, other = (from_file(tmp_path / str(number), around, "f(x)") for number in range(2))
    one(torch.ones(3, 4))
    manifests = [WrappedModel(model.eval()).manifest() for model in (one, other)]
    assert compare(*manifests).differences == ()


def test_of_long_texts_and_large_bytes() -> None:
    def model(held: Any) -> nn.Module:
        torch.manual_seed(0)
        return Holds(held, lambda held: float(len(held)))

    for held in ("scale the rows\n" * 1000, bytearray(1 << 22), array.array("d", [0.0]) * 100_000, [1.0, "a"] * 20_000):
        same, other = held[:], held[:-1]
        assert seen(model(held), model(same)) == () and "held" in " ".join(seen(model(held), model(other)))
        facts = WrappedModel(model(held)).manifest()
        assert max(map(len, facts.values())) < 1000
