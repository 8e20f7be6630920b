"""Where a model's Python keeps things outside of its tensors' flow, and what it puts there.

A store starts as 1.0 (or ones). ``put`` and ``get`` are templates: ``{v}`` is the value, ``{a}`` a register.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Store:
    """``top``: lines at the module's level. ``init``: lines of ``__init__``. ``shared``: on an object, ``self.box``,
    that all modules hold (``init`` is of its class then). ``context``: on an object that is made again in each forward.
    """

    put: str
    get: str
    init: tuple[str, ...] = ()
    top: tuple[str, ...] = ()
    shared: bool = False
    context: bool = False


_ROW = "torch.as_tensor({v}).expand(1, 8)[0]"
_CELL = """def cell():
    v = 1.0
    def put(new):
        nonlocal v
        v = new
    return put, lambda: v
put_cell, get_cell = cell()"""

STORES: dict[str, Store] = {
    "attribute": Store("self.v = {v}", "self.v", ("self.v = 1.0",)),
    "context": Store("ctx.v = {v}", "ctx.v", ("self.v = 1.0",), context=True),
    "context list": Store("ctx.items.append({v})", "ctx.items[-1]", ("self.items = [1.0]",), context=True),
    "context deep": Store(
        "ctx.deep[0][0][0][0][0][0] = {v}", "ctx.deep[0][0][0][0][0][0]", ("self.deep = [[[[[[1.0]]]]]]",), context=True
    ),
    "object": Store("self.box.v = {v}", "self.box.v", ("self.v = 1.0",), shared=True),
    "deque": Store(
        "self.box.q.append({v})",
        "self.box.q[-1]",
        ("self.q = collections.deque([1.0], maxlen=3)",),
        ("import collections",),
        shared=True,
    ),
    "deque from the left": Store(
        "self.box.q.append({v})",
        "self.box.q[0]",
        ("self.q = collections.deque([1.0], maxlen=3)",),
        ("import collections",),
        shared=True,
    ),
    "UserDict": Store(
        'self.box.u["v"] = {v}',
        'self.box.u["v"]',
        ("self.u = collections.UserDict(v=1.0)",),
        ("import collections",),
        shared=True,
    ),
    "dict": Store('self.box.d["v"] = {v}', 'self.box.d["v"]', ('self.d = {"v": 1.0}',), shared=True),
    "deep list": Store(
        "self.box.deep[0][0][0][0][0][0] = {v}",
        "self.box.deep[0][0][0][0][0][0]",
        ("self.deep = [[[[[[1.0]]]]]]",),
        shared=True,
    ),
    "numpy array": Store(
        "self.box.n[0] = float(torch.as_tensor({v}).float().mean())",
        "torch.from_numpy(self.box.n)",
        ('self.n = numpy.ones(8, "float32")',),
        ("import numpy",),
        shared=True,
    ),
    "global": Store("put_global({v})", "G", (), ("G = 1.0\ndef put_global(v):\n    global G\n    G = v",)),
    "global dict": Store('TABLE["v"] = {v}', 'TABLE["v"]', (), ('TABLE = {"v": 1.0}',)),
    "closure": Store("put_cell({v})", "get_cell()", (), (_CELL,)),
    "function attribute": Store("keep.v = {v}", "keep.v", (), ("def keep():\n    pass\nkeep.v = 1.0",)),
    "class attribute": Store("Kept.v = {v}", "Kept.v", (), ("class Kept:\n    v = 1.0",)),
    "context variable": Store(
        "VAR.set({v})", "VAR.get()", (), ("import contextvars", 'VAR = contextvars.ContextVar("VAR", default=1.0)')
    ),
    "weak dict": Store(
        "WEAK[self] = {v}", "WEAK.get(self, 1.0)", (), ("import weakref", "WEAK = weakref.WeakKeyDictionary()")
    ),
    "tag": Store("{a}.tag = {v}", 'getattr({a}, "tag", 1.0)'),
    "buffer": Store(f"self.buf.copy_({_ROW})", "self.buf", ('self.register_buffer("buf", torch.ones(8))',)),
    "buffer replaced": Store(f"self.new = {_ROW}.clone()", "self.new", ('self.register_buffer("new", torch.ones(8))',)),
    "buffer row": Store(
        f"self.rows[1] = {_ROW}", "self.rows.sum(0)", ('self.register_buffer("rows", torch.ones(3, 8))',)
    ),
    "tensor attribute": Store(f"self.kept.copy_({_ROW})", "self.kept", ("self.kept = torch.ones(8)",)),
    "parameter": Store(f"self.p.copy_({_ROW})", "self.p", ("self.p = nn.Parameter(torch.ones(8))",)),
}

VALUES: dict[str, str] = {
    "constant": "2.0",
    "equal": "1",
    "number of a shape": "{a}.shape[0] * 0.5",
    "number of data": "round(float({a}.mean()), 2)",
    "flag of data": "1 + bool({a}.sum() > 0)",
    "row": "{a}[:1]",
    "mean": "{a}.mean(0)",
    "clone": "{a}[:1].clone()",
    "count": "{old} + 0.5",
    "turn": "1.5 - {old}",
}
