"""Modules that write state, or might: each by another way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SEEN: list[Any] = []
SCALE = 2.0


def noted(*args: Any) -> Any:
    SEEN.append(args)
    return args[-1]


class Plain(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.child: Any = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.child(x)


class Counts(Plain):
    def forward(self, x: Tensor) -> Any:
        self.calls = 1
        return self.child(x)


class Appends(Plain):
    def forward(self, x: Tensor) -> Any:
        self.kept.append(x)
        return self.child(x)


class AppendsByName(Plain):
    def forward(self, x: Tensor) -> Any:
        kept = self.kept
        kept += [x]
        return self.child(x)


class AppendsInside(Plain):
    def forward(self, x: Tensor) -> Any:
        for kept in self.kept:
            kept.append(x)
        return self.child(x)


class HandsOut(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.kept


class TakesWhatIsHandedOut(Plain):
    def forward(self, x: Tensor) -> Any:
        self.child(x).append(1)
        return x


class Global(Plain):
    def forward(self, x: Tensor) -> Any:
        SEEN.append(1)
        return self.child(x)


class Rebinds(Plain):
    def forward(self, x: Tensor) -> Any:
        global SCALE
        SCALE = 3.0
        return self.child(x)


class Stores(Plain):
    def forward(self, x: Tensor) -> Any:
        self.table["x"] = 1
        return self.child(x)


class SetsBySetattr(Plain):
    def forward(self, x: Tensor) -> Any:
        setattr(self, "ca" + "lls", 1)
        return self.child(x)


class ByDict(Plain):
    def forward(self, x: Tensor) -> Any:
        self.__dict__.update(calls=1)
        return self.child(x)


class Seeds(Plain):
    def forward(self, x: Tensor) -> Any:
        torch.manual_seed(1)
        return self.child(x)


class Threads(Plain):
    def forward(self, x: Tensor) -> Any:
        torch.set_num_threads(1)
        return self.child(x)


class Scoped(Plain):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            return self.child(x)


class Toggles(Plain):
    def forward(self, x: Tensor) -> Any:
        self.child.eval()
        return self.child(x)


class Hooks(Plain):
    def forward(self, x: Tensor) -> Any:
        self.child.register_forward_hook(print)
        return self.child(x)


class Tags(Plain):
    def forward(self, x: Tensor) -> Any:
        x.tag = 1
        return self.child(x)


class TensorHook(Plain):
    def forward(self, x: Tensor) -> Any:
        x.requires_grad_().register_hook(print)
        return self.child(x)


class Applies(Plain):
    def forward(self, x: Tensor) -> Any:
        return x.apply_(SEEN.append)


class Mapped(Plain):
    def forward(self, x: Tensor) -> Any:
        list(map(SEEN.append, [1]))
        return self.child(x)


class Lambda(Plain):
    def forward(self, x: Tensor) -> Any:
        return (lambda y: noted(y))(x)


class Walrus(Plain):
    def forward(self, x: Tensor) -> Any:
        try:
            return self.child(x)
        except ValueError:
            return x


class Property(Plain):
    @property
    def scale(self) -> int:
        SEEN.append(1)
        return 2

    def forward(self, x: Tensor) -> Any:
        return self.child(x) * self.scale


class PropertyOfChild(Plain):
    def forward(self, x: Tensor) -> Any:
        return x * self.child.scale


class Found(Plain):
    def __getattr__(self, name: str) -> Any:
        SEEN.append(name)
        return super().__getattr__(name)


class FoundOfChild(Plain):
    def forward(self, x: Tensor) -> Any:
        return x * self.child.gain


class Called(Plain):
    def __call__(self, *args: Any) -> Any:
        SEEN.append(1)
        return super().__call__(*args)


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        SEEN.append(1)
        return function(*args)

    return wrapper


class Decorated(Plain):
    @logged
    def forward(self, x: Tensor) -> Any:
        return self.child(x)


class TorchDecorated(Plain):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return self.child(x)


class DecoratedHelper(Plain):
    @logged
    def helper(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor) -> Any:
        return self.helper(x)


class Helper(Plain):
    def helper(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor) -> Any:
        return self.helper(x)


class Operates(Plain):
    def forward(self, x: Tensor) -> Any:
        return x + self.offset


class Loud:
    def __radd__(self, other: Any) -> Any:
        SEEN.append(1)
        return other

    def __bool__(self) -> bool:
        SEEN.append(1)
        return True


class Asks(Plain):
    def forward(self, x: Tensor) -> Any:
        if self.offset:
            x = x + 1
        return x


class LoudList(nn.ModuleList):
    def __iter__(self) -> Any:
        SEEN.append(1)
        return super().__iter__()


class Iterates(Plain):
    def forward(self, x: Tensor) -> Any:
        for layer in self.child:
            x = layer(x)
        return x


class Shadowed(Plain):
    """The comprehension's F is not the F outside."""

    def forward(self, x: Tensor) -> Any:
        values = [G * 1 for G in (x, x)]
        G.add_(1)
        return values[0]


class G:
    @staticmethod
    def add_(number: int) -> None:
        SEEN.append(number)


class Raises(Plain):
    def forward(self, x: Tensor) -> Any:
        if x.shape[0] > 100:
            raise print("x")
        return x


class OtherEps(nn.LayerNorm):
    @property
    def eps(self) -> float:
        SEEN.append(1)
        return 1e-5

    @eps.setter
    def eps(self, value: float) -> None:
        pass


class OtherConv(nn.Conv2d):
    def _conv_forward(self, *args: Any) -> Any:
        SEEN.append(1)
        return super()._conv_forward(*args)


class LoudTensor(nn.Parameter):
    pass


class Recursive(Plain):
    def odd(self, x: Tensor, n: int) -> Any:
        return x if n == 0 else self.even(x, n - 1)

    def even(self, x: Tensor, n: int) -> Any:
        SEEN.append(n)
        return x if n == 0 else self.odd(x, n - 1)

    def forward(self, x: Tensor) -> Any:
        return self.odd(x, 3)


def with_shadow() -> nn.Module:
    module = Helper()
    module.helper = noted
    return module


def with_forward(kind: Callable[[], nn.Module]) -> nn.Module:
    module = kind()
    module.forward = noted
    return module


def with_call_impl() -> nn.Module:
    module = nn.Linear(4, 4)
    module._call_impl = noted
    return module


def with_hook(register: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    getattr(module[0], register)(lambda *args: None)
    return module


def with_parameter() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = LoudTensor(torch.ones(4, 4))
    return module


def parametrized() -> nn.Module:
    module = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(module, "weight", Counts(), unsafe=True)
    return module


def made_by_exec() -> nn.Module:
    space: dict[str, Any] = {"Plain": Plain, "SEEN": SEEN}
    exec("class Typed(Plain):\n    def forward(self, x):\n        SEEN.append(1)\n        return x\n", space)
    return space["Typed"]()


def lying_source() -> nn.Module:
    """The code of one function under the lines of another."""

    class Lying(Plain):
        pass

    honest, evil = Plain.forward, Global.forward
    code = evil.__code__.replace(co_firstlineno=honest.__code__.co_firstlineno, co_name=honest.__code__.co_name)
    Lying.forward = type(evil)(code, evil.__globals__, "forward")
    return Lying()


IMPURE: dict[str, Callable[[], nn.Module]] = {
    "counter": Counts,
    "list attribute": lambda: Appends(kept=[]),
    "list attribute by another name": lambda: AppendsByName(kept=[]),
    "list in a list": lambda: AppendsInside(kept=[[]]),
    "list handed out": lambda: HandsOut(kept=[]),
    "list handed out by a child": lambda: TakesWhatIsHandedOut(child=HandsOut(kept=[])),
    "global list": Global,
    "global name": Rebinds,
    "dictionary": lambda: Stores(table={}),
    "setattr": SetsBySetattr,
    "__dict__": ByDict,
    "seed": Seeds,
    "threads": Threads,
    "with": Scoped,
    "eval of a child": Toggles,
    "hook set inside": Hooks,
    "tag on a tensor": Tags,
    "hook on a tensor": TensorHook,
    "apply_": Applies,
    "map": Mapped,
    "lambda": Lambda,
    "try": Walrus,
    "property": Property,
    "property of a child": lambda: PropertyOfChild(child=Property()),
    "__getattr__": Found,
    "__getattr__ of a child": lambda: FoundOfChild(child=Found(gain=2)),
    "__call__": Called,
    "decorator": Decorated,
    "torch's decorator": TorchDecorated,
    "decorated helper": DecoratedHelper,
    "method shadowed": with_shadow,
    "operator": lambda: Operates(offset=Loud()),
    "truth": lambda: Asks(offset=Loud()),
    "iteration": lambda: Iterates(child=LoudList([nn.Linear(4, 4)])),
    "comprehension": Shadowed,
    "raise": Raises,
    "property of a subclass of torch's": lambda: OtherEps(4),
    "helper of a subclass of torch's": lambda: OtherConv(4, 4, 1),
    "activation": lambda: nn.TransformerEncoderLayer(8, 2, activation=noted),
    "impure child": lambda: Plain(child=Counts()),
    "impure child of a container": lambda: nn.Sequential(nn.Sequential(Counts())),
    "recursion": Recursive,
    "forward of the instance": lambda: with_forward(Plain),
    "forward of torch's instance": lambda: with_forward(nn.ReLU),
    "_call_impl": with_call_impl,
    "forward hook": lambda: with_hook("register_forward_hook"),
    "pre-hook": lambda: with_hook("register_forward_pre_hook"),
    "backward hook": lambda: with_hook("register_full_backward_hook"),
    "parameter of a class of its own": with_parameter,
    "parametrized": parametrized,
    "weight norm": lambda: torch.nn.utils.weight_norm(nn.Linear(4, 4)),
    "lazy": lambda: nn.LazyLinear(4),
    "scripted": lambda: torch.jit.script(nn.ReLU()),
    "traced by fx": lambda: torch.fx.symbolic_trace(Plain()),
    "exec": made_by_exec,
    "lying source": lying_source,
}
