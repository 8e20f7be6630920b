"""Simple statements of a program, as templates of source.

``{y}`` is a new register (absent where a statement only writes), ``{a}`` and ``{b}`` are registers, ``{n}`` is a number
from 0 to 7, ``{s}`` a slot from 0 to 2 (so that modules are called several times), ``{k}`` a number from 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """``init``: lines of ``__init__``, ``top``: lines of the module."""

    text: str
    init: tuple[str, ...] = ()
    top: tuple[str, ...] = ()


def _linear(text: str) -> Kind:
    return Kind(text, ("self.l{s} = nn.Linear(8, 8)",))


LAYERS: dict[str, Kind] = {
    "linear": _linear("{y} = self.l{s}({a})"),
    "linear tanh": _linear("{y} = torch.tanh(self.l{s}({a}))"),
    "linear relu_": _linear("{y} = self.l{s}({a}).relu_()"),
    "linear by weight": _linear("{y} = nn.functional.linear({a}, self.l{s}.weight)"),
    "linear by forward": _linear("{y} = self.l{s}.forward({a})"),
    "conv": Kind(
        "{y} = self.c{s}({a}.reshape(-1, 2, 4)).reshape(-1, 8)", ("self.c{s} = nn.Conv1d(2, 2, 3, padding=1)",)
    ),
    "norm": Kind("{y} = self.n{s}({a})", ("self.n{s} = nn.LayerNorm(8)",)),
    "batch norm": Kind("{y} = self.bn{k}({a})", ("self.bn{k} = nn.BatchNorm1d(8)",)),
    "dropout": Kind("{y} = self.drop({a})", ("self.drop = nn.Dropout(0.5)",)),
    "relu in place": Kind("{y} = self.relu({a})", ("self.relu = nn.ReLU(inplace=True)",)),
    "identity": Kind("{y} = self.same({a})", ("self.same = nn.Identity()",)),
    "gru cell": Kind("{y} = self.gru{k}({a}, {b})", ("self.gru{k} = nn.GRUCell(8, 8)",)),
    "lstm cell": Kind("h, c = self.lstm{k}({a}, ({b}, {a}))\n{y} = h + c", ("self.lstm{k} = nn.LSTMCell(8, 8)",)),
    "gru": Kind("{y} = self.rnn({a}[None])[0][0]", ("self.rnn = nn.GRU(8, 8)",)),
    "sequential": Kind(
        "{y} = self.seq{k}({a})", ("self.seq{k} = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))",)
    ),
    "module list": Kind(
        "{y} = {a}\nfor layer in self.many:\n    {y} = layer({y})",
        ("self.many = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))",),
    ),
    "embedding": Kind("{y} = {a} + self.emb(({b}[:, 0] > 0).long())", ("self.emb = nn.Embedding(4, 8)",)),
    "join": Kind("{y} = self.join(torch.cat([{a}, {b}], -1))", ("self.join = nn.Linear(16, 8)",)),
    "traced by fx": Kind(
        "{y} = self.fx({a})",
        ("self.fx = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))",),
        ("from torch import fx",),
    ),
    "own hook": Kind(
        "{y} = self.l{s}({a}) + self.seen",
        (
            "self.l{s} = nn.Linear(8, 8)",
            "self.seen = 0",
            "self.l{s}.register_forward_hook(lambda m, i, o: setattr(self, 'seen', o[:1]))",
        ),
    ),
}

MATHS: dict[str, Kind] = {
    "add": Kind("{y} = {a} + {b}"),
    "subtract": Kind("{y} = {a} - 0.5 * {b}"),
    "gate": Kind("{y} = {a} * torch.sigmoid({b})"),
    "where": Kind("{y} = torch.where({a} > 0, {a}, {b})"),
    "attend": Kind("{y} = torch.softmax({a} @ {b}.T, -1) @ {b}"),
    "positions": Kind("{y} = {a} + torch.arange({a}.shape[-1]) * 0.01"),
    "sum": Kind("{y} = {a}.sum(-1, keepdim=True).expand(-1, 8) * 0.1"),
    "sort": Kind("{y} = {a}.sort(-1).values"),
    "one hot": Kind("{y} = nn.functional.one_hot({a}.argmax(-1), 8) * {b}"),
    "list comprehension": Kind("{y} = torch.stack([row * 0.5 for row in {a}])"),
    "vmap": Kind("{y} = torch.vmap(lambda row: row * 0.5)({a})"),
}

VIEWS: dict[str, Kind] = {
    "alias": Kind("{y} = {a}[:]"),
    "transpose": Kind("{y} = {a}.reshape(-1, 2, 4).transpose(1, 2).reshape(-1, 8)"),
    "transposed strides": Kind("{y} = {a}.T.contiguous().T"),
    "view": Kind("{y} = {a}.view(-1, 4, 2).view(-1, 8)"),
    "slices": Kind("{y} = torch.cat([{a}[:, ::2], {b}[:, 1::2]], -1)"),
    "unbind": Kind("{y} = torch.stack({a}.unbind(0))"),
    "chunk": Kind("left, right = {a}.chunk(2, -1)\n{y} = torch.cat([right, -left], -1)"),
    "split": Kind("{y} = torch.cat({a}.split([3, 5], -1)[::-1], -1)"),
    "expand": Kind("{y} = {a}[:1].expand_as({a})"),
    "flip": Kind("{y} = {a}.flip(-1)"),
    "detach": Kind("{y} = {a}.detach()"),
    "as strided": Kind("{y} = {a}.as_strided({a}.shape, {a}.stride())"),
    "integer view": Kind("{y} = {a} + ({b}.view(torch.int32) % 3)"),
    "byte view": Kind("{y} = {a} + {b}.contiguous().view(torch.uint8)[:, 1:9] * 0.01"),
    "odd byte view": Kind("{y} = {a} + {b}.contiguous().view(torch.uint8).flatten()[{n}:][:8] * 0.01"),
    "complex view": Kind("{y} = torch.view_as_real(torch.view_as_complex({a}.reshape(-1, 4, 2)) * 1j).reshape(-1, 8)"),
    "conjugate": Kind(
        "held = torch.view_as_complex({a}.reshape(-1, 4, 2) * 1).conj()\n"
        "{y} = torch.view_as_real(held * 1).reshape(-1, 8)"
    ),
    "conjugate bit": Kind(
        "held = torch.view_as_complex({a}.reshape(-1, 4, 2) * 1).conj()\n"
        "{y} = {a} * (1 + held.is_conj()) + torch.cat([held.imag, held.real], -1)"
    ),
    "as subclass": Kind("{y} = {a}.as_subclass(Tagged)", (), ("class Tagged(torch.Tensor):\n    pass",)),
}

WRITES: dict[str, Kind] = {
    "relu_": Kind("{a}.relu_()"),
    "add_": Kind("{a}.add_({b})"),
    "set columns": Kind("{a}[:, {n}:] = {b}[:, {n}:].clone() * 0.5"),
    "set row": Kind("{a}[{k}] = {b}.mean(0)"),
    "copy_": Kind("{a}.copy_({b}.clone())"),
    "scale a row": Kind("{a}[{k}].mul_(0.5)"),
    "scale an unbound row": Kind("{a}.unbind(0)[{k}].mul_(0.5)"),
    "write transposed": Kind("{a}[:, :2].T.sub_(0.1)"),
    "masked_fill_": Kind("{a}.masked_fill_({b} > 0, 0.1)"),
    "fresh buffer": Kind("{y} = torch.zeros({a}.shape)\n{y}[{k}] = {a}[0]"),
    "fresh buffer of one value": Kind("{y} = torch.empty_like({a}).fill_(0.3)\n{y}[:, :{n}] = {b}[:, :{n}]"),
    "out": Kind("{y} = torch.empty({a}.shape)\ntorch.add({a}, {b}, out={y})"),
    "scratch": Kind(
        "self.scratch[:{a}.shape[0]] = {a}\n{y} = self.scratch[:{a}.shape[0]] * 0.5",
        ('self.register_buffer("scratch", torch.zeros(4, 8))',),
    ),
    "rng in place": Kind("{y} = torch.empty_like({a}).normal_()"),
    "constant at data": Kind(
        "{y} = torch.ones({a}.shape)\n{y}[torch.arange(len({a})), {b}.argmax(-1)] = 0.25\n{y} = {a} * {y}"
    ),
    "constant from data": Kind("{y} = torch.ones(8)\n{y}[int({b}[0].argmax()) :] = 0.5\n{y} = {a} * {y}"),
    "narrow by data": Kind(
        "{y} = torch.ones({a}.shape)\n{y}.narrow(1, int({b}[0].argmax()) % 7, 2).fill_(0.5)\n{y} = {a} * {y}"
    ),
    "numpy write": Kind("{a}.detach().numpy()[{k}] = 0.25"),
    "numpy result": Kind("{y} = torch.from_numpy({a}.detach().numpy() * 2) * 1"),
    "data write": Kind("{a}.data.mul_(0.5)"),
    "data swap": Kind("{y} = {a} * 1\n{y}.data = {b}.clone()"),
    "set_": Kind("{y} = {a} * 1\n{y}.set_({b}.clone())"),
    "resize_": Kind("{y} = torch.empty(0).resize_({a}.shape).copy_({a})"),
    "weight changed": Kind("self.l0.weight.mul_(0.5)", ("self.l0 = nn.Linear(8, 8)",)),
    "weight read through data": _linear("self.l{s}.weight.data.copy_(self.l{s}.weight * {a}.mean())"),
}

DATA: dict[str, Kind] = {
    "item": Kind("{y} = {b} * max(-2.0, min(2.0, {a}.mean().item()))"),
    "rows by data": Kind("{y} = {b} * {a}[:, : 1 + int(({a}[0] > 0).sum()) % 8].sum(-1, keepdim=True)"),
    "masked": Kind("{y} = {b} + {a}[{a} > 0].sum()"),
    "nonzero": Kind("{y} = {b} + len({a}.nonzero()) * 0.01"),
    "index": Kind("{y} = {b}[{a}.argmax(0) % {b}.shape[0]][:1].expand_as({b})"),
    "own operation": Kind(
        "{y} = {b} + torch.ops.isthmus_fuzz.keep({a}).sum(0)", (), ("import studies.fuzz.operation  # registers keep",)
    ),
    "rounds by address": Kind(
        "{y} = torch.ops.isthmus_fuzz.by_address({a})",
        (),
        ("import studies.fuzz.operation  # registers by_address",),
    ),
    "table by data": Kind("{y} = {a} * self.table[int({b}.argmax()) % 4]", ("self.table = [0.5, 1.0, 1.5, 2.0]",)),
    "table by tensor": Kind("{y} = {a} * TABLE8[{b}.argmax(-1)][:, None]", (), ("TABLE8 = torch.arange(8) / 8",)),
    "numpy table": Kind(
        "{y} = {a} * torch.from_numpy(STEPS)[{n}]", (), ("import numpy", 'STEPS = numpy.arange(8, dtype="float32") / 4')
    ),
    "equality": Kind("{y} = {a} * 2 if torch.equal({a}, {b}) else {b} * 0.5"),
    "sort in Python": Kind("{y} = {a}[sorted(range(len({a})), key=lambda i: float({a}[i, 0]))]"),
    "tolist": Kind("{y} = {a} + torch.tensor({b}[0].tolist())"),
    "str": Kind("{y} = {a} * (len(str(float({b}[0, 0]))) % 3)"),
}

PYTHON: dict[str, Kind] = {
    "lazy constant": Kind(
        "if self.lazy is None:\n    self.lazy = torch.linspace(-1, 1, 8)\n{y} = {a} + self.lazy", ("self.lazy = None",)
    ),
    "memo of data": Kind(
        "if self.memo is None:\n    self.memo = {a}[:1].clone()\n{y} = {a} + self.memo", ("self.memo = None",)
    ),
    "memo of a number": Kind(
        "if self.numbers is None:\n    self.numbers = [1 + bool({a}.sum() > 0)]\n{y} = {a} * self.numbers[0]",
        ("self.numbers = None",),
    ),
    "memo of an object": Kind(
        "if self.noted is None:\n    self.noted = Noted(float({a}.max()))\n{y} = {a} * self.noted.value",
        ("self.noted = None",),
        ("class Noted:\n    def __init__(self, value):\n        self.value = value",),
    ),
    "memo by shape": Kind(
        "if {a}.shape not in self.memos:\n    self.memos[{a}.shape] = {b}.mean()\n{y} = {a} + self.memos[{a}.shape]",
        ("self.memos = {{}}",),
    ),
    "cached function": Kind(
        "{y} = {a} + positions(8)",
        (),
        ("import functools", "@functools.lru_cache\ndef positions(n):\n    return torch.arange(n) / n"),
    ),
    "state h": Kind(
        "self.h = torch.tanh(self.l0({a}[:1]) + self.h)\n{y} = {a} + self.h",
        ("self.l0 = nn.Linear(8, 8)", "self.h = torch.zeros(1, 8)"),
    ),
    "key-value cache": Kind(
        "self.kv[self.at % 4] = {a}[0]\nself.at += 1\n{y} = {a} + self.kv.sum(0)",
        ('self.register_buffer("kv", torch.zeros(4, 8))', "self.at = 0"),
    ),
    "key-value cache all in buffers": Kind(
        "self.kv.copy_(torch.cat([self.kv[1:], {a}[:1]]))\n{y} = {a} + self.kv.mean(0)",
        ('self.register_buffer("kv", torch.zeros(4, 8))',),
    ),
    "random": Kind("{y} = {a} * random.random()", (), ("import random",)),
    "seeded random": Kind("random.seed({n})\n{y} = {a} * random.random()", (), ("import random",)),
    "torch random": Kind("{y} = {a} + torch.rand(8)"),
    "torch random read": Kind("{y} = {a} * torch.rand(()).item()"),
    "changed later": Kind("{y} = {a} * self.later  # somebody changes it between requests", ("self.later = 1.0",)),
    "width changed later": Kind(
        "{y} = {b} + {a}[:, : int(4 * self.later) % 9].sum(-1, keepdim=True)", ("self.later = 1.0",)
    ),
    "counter": Kind(
        "{y} = {a} * (1 + next(self.counter) % 3)",
        ("self.counter = itertools.count()",),
        ("import itertools",),
    ),
    "read training": Kind("{y} = {a} * 2 if self.l0.training else {a} * 1", ("self.l0 = nn.Linear(8, 8)",)),
    "read own training": Kind("{y} = {a} * 2 if self.training else {a} * 1"),
    "read flag": Kind("{y} = {a} * 2 if self.flag else {a} * 1", ("self.flag = False",)),
    "read default dtype": Kind("{y} = {a} * (torch.ones(1).element_size() / 8)"),
    "read scopes": Kind("{y} = {a} * (1 + 0.5 * len(SCOPES))", (), ("SCOPES = []",)),
    "read autocast": Kind('{y} = {a} * (1 + 0.5 * torch.is_autocast_enabled("cpu"))'),
    "turn training on": Kind("self.l0.train()", ("self.l0 = nn.Linear(8, 8)",)),
    "turn training off": Kind("self.l0.eval()", ("self.l0 = nn.Linear(8, 8)",)),
    "raise flag": Kind("self.flag = True", ("self.flag = False",)),
    "lower flag": Kind("self.flag = False", ("self.flag = False",)),
    "push scope": Kind("SCOPES.append({n})", (), ("SCOPES = []",)),
    "pop scope": Kind("SCOPES[-1:] = []", (), ("SCOPES = []",)),
    "zip of registers": Kind("{y} = sum(p * q for p, q in zip([{a}, {b}], [0.5, 0.25]))"),
    "dict of registers": Kind('pair = {{"p": {a}, "q": {b}}}\npair["p"] = pair["q"] * 0.5\n{y} = sum(pair.values())'),
    "nested lists": Kind("held = [[{a}], [{b}, ({a},)]]\nheld[1].append({b} * 0.5)\n{y} = held[1][2] + held[1][1][0]"),
    "dataclass": Kind(
        "pair = Pair({a}, {b})\npair.p = pair.q * 0.5\n{y} = pair.p + pair.q",
        (),
        ("import dataclasses", "@dataclasses.dataclass\nclass Pair:\n    p: object\n    q: object"),
    ),
    "thread": Kind(
        "box = []\nworker = threading.Thread(target=lambda: box.append({a} * 0.5))\nworker.start()\nworker.join()\n"
        "{y} = box[0]",
        (),
        ("import threading",),
    ),
    "layer in a thread": Kind(
        "box = []\nworker = threading.Thread(target=lambda: box.append(self.l{s}({a})))\nworker.start()\n"
        "worker.join()\n{y} = box[0] if box else {a}",
        ("self.l{s} = nn.Linear(8, 8)",),
        ("import threading",),
    ),
    "memo list": Kind(
        "held = []\nself.taker.memo = held\n{y} = self.taker({a})\n{y} = {y} + held[-1]",
        ("self.taker = Taker()",),
        (
            "class Taker(nn.Module):\n    memo = None\n    def __init__(self):\n        super().__init__()\n"
            "        self.inner = nn.Linear(8, 8)\n    def forward(self, x):\n        x = torch.tanh(self.inner(x))\n"
            "        self.memo.append(x)\n        return x",
        ),
    ),
    "fork rng": Kind(
        "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed({n})\n    {y} = {a} + torch.rand(8)"
    ),
    "rng state put back": Kind("state = torch.get_rng_state()\n{y} = {a} + torch.rand(8)\ntorch.set_rng_state(state)"),
    "version": Kind("{y} = {a} * (1 + {a}._version % 2)"),
    "base": Kind("{y} = {a} * (2 if {b}._base is None else 1)"),
    "requires grad": Kind("{y} = {a} * (2 if {b}.requires_grad else 1)"),
    "class of a parameter": Kind(
        "self.l0.weight.__class__ = Other\n{y} = {a} * (2 if type(self.l0.weight) is Other else 1)",
        ("self.l0 = nn.Linear(8, 8)",),
        ("class Other(nn.Parameter):\n    pass",),
    ),
    "function that counts": Kind(
        "{y} = Counts.apply({a}) * (1 + Counts.calls % 2)",
        (),
        (
            "class Counts(torch.autograd.Function):\n    calls = 0\n    @staticmethod\n    def forward(ctx, x):\n"
            "        Counts.calls += 1\n        return x * 0.5",
        ),
    ),
    "functional": Kind("{y} = nn.functional.relu({a})"),
    "denormal": Kind("{y} = {a} + ({b} * 1e-38 * 1e-3) * 1e38"),
    "drop": Kind("del {b}"),
}

SIMPLE: dict[str, Kind] = {**LAYERS, **MATHS, **VIEWS, **WRITES, **DATA, **PYTHON}
