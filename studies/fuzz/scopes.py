"""Compound statements: loops, branches, exceptions, and what is set for a while and put back.

``{body}`` is where the body goes, ``{last}`` the latest register in it (``{a}`` where the body makes none), ``{y}`` the
register that the whole makes. The other names are those of `kinds`.
"""

from __future__ import annotations

from studies.fuzz.kinds import Kind

_L0 = ("self.l0 = nn.Linear(8, 8)",)
_STACK = ("SCOPES = []",)
_LOCK = ("import threading", "LOCK = threading.Lock()")
_END = ("class Enough(Exception):\n    pass",)
_SET = (
    "import contextlib",
    "@contextlib.contextmanager\ndef flagged(module):\n    module.flag = True\n    try:\n        yield\n"
    "    finally:\n        module.flag = False",
)

_ADDS = (
    "class Adds:\n    def __init__(self, held):\n        self.held = held\n    def __enter__(self):\n"
    "        return self\n    def __exit__(self, *error):\n        self.held.add_(1)",
)


def _around(before: str, after: str, init: tuple[str, ...] = (), top: tuple[str, ...] = ()) -> Kind:
    return Kind(f"{before}\n{{body}}\n{after}\n{{y}} = {{last}}", init, top)


def _if(test: str) -> Kind:
    return Kind(f"if {test}:\n    {{body}}\n    {{y}} = {{last}}\nelse:\n    {{y}} = {{a}} * 0.5")


SCOPES: dict[str, Kind] = {
    "for": Kind("for i in range(1 + {k}):\n    {body}\n    {y} = {last}"),
    "for rows": Kind("for row in {a}:\n    {body}\n    {y} = {last} + row"),
    "while data": Kind(
        "{y}, turns = {a}, 0\nwhile turns < 2 and {y}.sum() > 0:\n    {body}\n    {y}, turns = {last} - 0.5, turns + 1"
    ),
    "if shape": _if("{a}.shape[0] > 2"),
    "if data": _if("{a}.sum() > 0"),
    "if item": _if("{a}.max().item() > 0.7"),
    "if equal": _if("torch.equal({a}, {b})"),
    "if all close": _if("torch.allclose({a}, {b})"),
    "if any": _if("({a} > 1).any()"),
    "if type": _if("isinstance({a}, torch.Tensor) and {a}.is_contiguous()"),
    "if same object": _if("{a} is {b}"),
    "if training": _if("self.training"),
    "if flag": Kind(_if("self.flag").text, ("self.flag = False",)),
    "try and raise": Kind(
        "try:\n    {body}\n    if {a}.sum() > 0:\n        raise Enough\n    {y} = {last}\nexcept Enough:\n"
        "    {y} = {a} * 0.5",
        (),
        _END,
    ),
    "carried by an exception": Kind(
        "try:\n    {body}\n    raise Enough({last})\nexcept Enough as error:\n    {y} = error.args[0] * 0.5", (), _END
    ),
    "swallow everything": Kind("try:\n    {body}\n    {y} = {last}\nexcept Exception:\n    {y} = {a} * 0.5"),
    "index error": Kind("try:\n    {body}\n    {y} = {last} + ({a}, {b})[3]\nexcept IndexError:\n    {y} = {a} * 0.5"),
    "finally": Kind("try:\n    {body}\n    {y} = {last}\nfinally:\n    self.flag = False", ("self.flag = False",)),
    "flag up": _around("self.flag = True", "self.flag = False", ("self.flag = False",)),
    "flag turned": _around("self.flag = not self.flag", "self.flag = not self.flag", ("self.flag = False",)),
    "finally writes": Kind("try:\n    {body}\n    {y} = {last} * 1\nfinally:\n    {a}.add_(1)"),
    "writes on leaving": Kind("with Adds({a}):\n    {body}\n{y} = {last} * 1", (), _ADDS),
    "denormals flushed": _around("torch.set_flush_denormal(True)", "torch.set_flush_denormal(False)"),
    "function of torch swapped": _around(
        "kept, nn.functional.relu = nn.functional.relu, torch.tanh", "nn.functional.relu = kept"
    ),
    "flag managed": Kind("with flagged(self):\n    {body}\n{y} = {last}", ("self.flag = False",), _SET),
    "child training": _around("self.l0.train()", "self.l0.eval()", _L0),
    "all training": _around("self.train(not self.training)", "self.train(not self.training)"),
    "training flag kept": _around("mode = self.l0.training\nself.l0.train(not mode)", "self.l0.train(mode)", _L0),
    "default dtype": _around("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    "scope stack": _around("SCOPES.append({n})", "SCOPES.pop()", (), _STACK),
    "depth": _around("self.depth += 1", "self.depth -= 1", ("self.depth = 0",)),
    "lock": _around('if not LOCK.acquire(timeout=0.02):\n    raise OSError("locked")', "LOCK.release()", (), _LOCK),
    "weight doubled": _around("self.l0.weight.mul_(2)", "self.l0.weight.div_(2)", _L0),
    "weight swapped": _around(
        "kept = self.l0.weight.data\nself.l0.weight.data = kept * 2", "self.l0.weight.data = kept", _L0
    ),
    "forward swapped": _around(
        "kept, self.l0.forward = self.l0.forward, lambda x: x * 2", "self.l0.forward = kept", _L0
    ),
    "module swapped": _around("kept, self.l0 = self.l0, nn.Identity()", "self.l0 = kept", _L0),
    "store for a while": Kind("kept = {get}\n{put}\n{body}\n{put_kept}\n{y} = {last}"),
    "autocast": Kind('with torch.autocast("cpu", torch.bfloat16):\n    {body}\n{y} = {last}.float()'),
    "inner function": Kind("def inner({a}):\n    {body}\n    return {last}\n{y} = inner({a})"),
}
