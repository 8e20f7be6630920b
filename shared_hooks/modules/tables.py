"""Tables: tensors and arrays that a model computes with and no state dictionary names: frequencies, masks, windows.

Code creates them from numbers, such as buffers that are not persistent, so nothing else shows that two sides differ in
them. Another release of torch, or another processor, changes their last bits: so a fact has, besides a hash, some
values, and `compared` says whether two sides' are equal except for rounding.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shared_hooks.modules.attach import COMPILED, Shim
from shared_hooks.modules.constants import OF_EVERY_MODULE, digest_of, form_of, inside, tensor_hash

# The static module tree: which modules are walked, and by which names.


ROOT = "(model)"
INPUT = "input"
"""The cut before any layer."""


@dataclass(frozen=True)
class ModuleInfo:
    """One module of the tree. ``path``: its first name; ``(model)`` for the model itself.

    ``name``: the name of its first call.
    """

    path: str
    module_type: str
    opaque: bool
    name: str


def is_opaque(module: nn.Module) -> bool:
    """Return whether a module runs without Python (scripted or compiled): one layer, with nothing inside."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or type(module).__name__ == "OptimizedModule"
        or module.__dict__.get(COMPILED) is not None  # compiled in place
    )


def walk(model: nn.Module, depth: int | None) -> dict[nn.Module, ModuleInfo]:
    """Return every module down to ``depth`` (0 = the model alone, None = all), under its first name, in definition
    order.
    """
    found: dict[nn.Module, ModuleInfo] = {}
    deepest = 0
    waiting = [(model, "", 0)]
    while waiting:
        module, path, level = waiting.pop()
        if module in found:
            continue
        deepest = max(deepest, level)
        opaque = is_opaque(module)
        found[module] = ModuleInfo(path or ROOT, type(module).__name__, opaque, call_name(path or ROOT, 1))
        if not opaque and (depth is None or level < depth):
            children = [
                (child, f"{path}.{name}" if path else name, level + 1) for name, child in module.named_children()
            ]
            waiting += reversed(children)
    # a module's call takes three frames of its own, and as many of ours
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + 16 * deepest if deepest > 50 else 0))
    return found


# The parts of a multimodal model by purpose: vision, audio, fusion, language, head.
#
# Found by the words in a module's name and in the name of its type; a module belongs to the group of the outermost
# ancestor that has one, so that a projection inside a vision encoder is vision. `GROUPS` may be extended with
# `add_group`.

GROUP: Final = "group:"
"""The prefix for a group in place of modules: "group:vision"."""
GROUPS: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {}
"""Group -> (pattern for the last part of a name, pattern for a type's name), both searched in lower case."""


def add_group(group: str, names: str, types: str = "(?!)") -> None:
    """Add a group, or replace one: regular expressions for names and for the names of types."""
    GROUPS[group] = (re.compile(names), re.compile(types))


add_group("vision", r"^(vision|visual|image|pixel|vit$)", r"^(?!.*text).*(vision|visual|image.?encoder)(?!.*2seq)")
add_group("audio", r"^(audio|speech|acoustic|wave)", r"^(?!.*text).*(audio|speech)")
add_group(
    "fusion",
    r"(fusion|cross_?modal|multi_?modal|connector|projector|q_?former|perceiver|resampler)",
    r"(fusion|crossmodal|multimodal|connector|projector|qformer|perceiver|resampler)",
)
add_group("language", r"^(text|language|llm|bert|roberta)", r"(text|language)(model|encoder|decoder|transformer)")
add_group(
    "head", r"(^|_)(head|classifier|score|fc|logits?)($|_)|^classifier|(visual|text|vision|audio)_projection$", r"head$"
)


def grouped(modules: Iterable[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Return the modules of each group that has any: ``{group: {path: path of the outermost module around it}}``.

    ``modules``: pairs (path, name of the type), parents before children.
    """
    found: dict[str, dict[str, str]] = {}
    owner: dict[str, tuple[str, str] | None] = {ROOT: None, "": None}
    for path, kind in modules:
        parts = path.split(".")
        for count in range(1, len(parts) + 1):  # containers may not be among them
            one = ".".join(parts[:count])
            if one not in owner:
                parent = owner[".".join(parts[: count - 1])]
                group = None if parent else _group(parts[count - 1].lower(), kind.lower() if one == path else "")
                owner[one] = parent or (None if group is None else (group, one))
        if (mine := owner[path]) is not None:
            found.setdefault(mine[0], {})[path] = mine[1]
    return found


def groups_of(model: nn.Module) -> dict[str, dict[str, str]]:
    """As `grouped`, for all modules of a model, in definition order."""
    return grouped((info.path, info.module_type) for info in walk(model, None).values())


def _group(name: str, kind: str) -> str | None:
    # projections are named after what they project: the more specific rules first
    for group in ("head", "fusion", *GROUPS):
        names, _ = GROUPS.get(group, (None, None))
        if names is not None and names.search(name):
            return group
    return next((group for group, (_, types) in GROUPS.items() if types.search(kind)), None)


def aliases(model: nn.Module) -> dict[str, str]:
    """Second and further names of a module -> its first name."""
    first: dict[nn.Module, str] = {}
    found: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kept = first.setdefault(module, name or ROOT)
        if kept != (name or ROOT):
            found[name] = kept
    return found


def holder_modules(model: nn.Module) -> set[str]:
    """Return the Python modules whose dataclasses and named tuples this model may take or return: those of its own
    classes.
    """
    found = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    if any(name.startswith("transformers.") for name in found):
        found.add("transformers.modeling_outputs")
    return found | {"torch.nn.utils.rnn"}


def call_name(path: str, number: int) -> str:
    """Return the name of a module's call: the module's path, with ``#n`` from the second call on.

    Where the path alone has another meaning, its first call is ``#1``: "input" is the cut before any layer, and "a#2"
    the second call of "a".
    """
    return path if number == 1 and path != INPUT and "#" not in path else f"{path}#{number}"


_NUMBERED: Final = re.compile(r"(.+)#([1-9][0-9]{0,8})", re.DOTALL)


def call_parts(name: str) -> tuple[str, int]:
    """Return the module's path and the number of the call of this name, which a client may have sent."""
    found = _NUMBERED.fullmatch(name)
    return (name, 1) if found is None else (found[1], int(found[2]))


WHOLE: Final = 256
"""The number of values of a table that are given one by one; for a larger one half as many, and the means of as many
parts.
"""
LONGEST: Final = 4096
"""The precision of an angle depends on its position's size: a table of sines is trusted by its length, up to this
length.
"""
ULPS: Final = 16
"""The tolerated difference of two machines' functions, relative to each value; `FEW` to the largest one, where values
cancel out.
"""
FEW: Final = 4
FLIPPED: Final = 0.01
"""The share of a table's values that may be rounded to another neighbour if they are kept in half the bits."""

Tables = Mapping[tuple[str, str], str]
"""By the module's path and a name."""


def tables(model: nn.Module, held: Iterable[tuple[str, Any]] = ()) -> dict[tuple[str, str], str]:
    """Return the tables of a model: the form, a hash, and some values of each. Call it before the first forward.

    ``held``: what its code holds, by name: globals, closure variables.
    """
    modules = list(model.named_modules())
    stated = {id(parameter) for parameter in model.parameters()}
    for _, module in modules:
        own = module._non_persistent_buffers_set
        stated |= {id(buffer) for name, buffer in module.named_buffers(recurse=False) if name not in own}
    found = {}
    known = {id(module) for _, module in modules}
    for path, module in modules:
        kept: dict[str, Any] = dict(module.named_buffers(recurse=False))
        kept |= {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
        package = type(module).__module__.partition(".")[0]
        for name, value in kept.items():
            for number, table in enumerate(_in(value, package, known)):
                if id(table) not in stated:
                    found[path, f"{name}.{number}" if number else name] = _fact(table)
    around: dict[str, set[str]] = {}  # two functions of one name may hold different values
    for name, value in held:
        # others may read files for their contents
        if isinstance(value, (torch.Tensor, np.ndarray, list, tuple, dict, nn.Module)):
            several = {_fact(table) for table in _in(value, "", known) if id(table) not in stated}
            around.setdefault(name, set()).update(several)
    for name, facts in around.items():
        for number, fact in enumerate(sorted(facts)):
            found["", f"{name}.{number}" if number else name] = fact
    return found


def _in(value: Any, package: str, known: Iterable[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, functions, modules except those ``known``, and objects of the module's own
    package, at any depth.
    """
    seen = set(known)
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, (bool, int, float, str, bytes, type, Shim)) or value is None:
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        inner: Iterable[Any] = ()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, np.ndarray):
            if value.dtype.kind in "biufc" and value.dtype.isnative:
                yield torch.from_numpy(np.array(value))
        elif isinstance(value, (list, tuple)):  # whose class may define another length, or none
            inner = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        elif isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, nn.Module):
            inner = [*value._parameters.values(), *value._buffers.values(), *(inside(value) or {}).values()]
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            inner = (inside(value) or {}).values()
        elif type(value).__module__.partition(".")[0] == package and hasattr(value, "__dict__"):
            inner = vars(value).values()
        left += reversed([*inner])


def digest(found: Tables) -> str:
    """Return the digest of forms and hashes."""
    return digest_of([[*place, fact.rpartition(" ")[0]] for place, fact in sorted(found.items())])


def _fact(value: torch.Tensor) -> str:
    """``float32[64] HASH VALUES``; the last is "-" for what must be equal in every bit."""
    name, shape = form_of(value)
    form = f"{name}{shape}".replace(" ", "")
    if value.is_meta:
        return f"{form} meta -"
    try:
        exact = tensor_hash(value)
    except (RuntimeError, TypeError, NotImplementedError):  # of a kind that does not expose its bytes
        return f"{form} unreadable -"
    is_plain = value.layout == torch.strided and not value.is_quantized and value.numel()
    if not is_plain or not (value.is_floating_point() or value.is_complex()):
        return f"{form} {exact} -"
    with torch.no_grad():
        value = value.detach().cpu().resolve_conj().resolve_neg()
        return f"{form} {exact} {_summary((torch.view_as_real(value) if value.is_complex() else value).reshape(-1))}"


def _summary(flat: torch.Tensor) -> str:
    """Which values are not finite (a hash), how many bits they fit in, how many of the sample are no means, and the
    sample, after the largest magnitude.
    """
    odd, largest, narrow = hashlib.blake2b(digest_size=8), 0.0, True
    means: list[float] = []
    spots: list[float] = []
    count = flat.numel()
    parts = 1 if count <= WHOLE else WHOLE // 2
    for part in range(parts):
        begin, end = part * count // parts, (part + 1) * count // parts
        values: NDArray[np.float64] = flat[begin:end].double().numpy()
        finite = np.isfinite(values)
        odd.update(
            np.where(finite, 0, np.where(np.isnan(values), 1, np.where(values > 0, 2, 3))).astype(np.int8).tobytes()
        )
        values = np.where(finite, values, 0.0)
        with np.errstate(over="ignore", under="ignore"):
            narrow = narrow and bool((values.astype(np.float32).astype(np.float64) == values).all())
        largest = max(largest, float(np.abs(values).max()))
        means.append(float((values / len(values)).sum()))
        spots += values.tolist() if parts == 1 else [float(values[part * 2654435761 % len(values)])]
    sample = np.array([largest, *spots, *(means if parts > 1 else ())])
    data = sample.astype("<f4" if narrow else "<f8").tobytes()
    return f"{odd.hexdigest()}:{'single' if narrow else 'double'}:{len(spots)}:{base64.b64encode(data).decode()}"


@dataclass(frozen=True)
class ComparedTable:
    """Two sides' facts of one table. ``client``, ``server``: the values that differ most, as text."""

    alike: bool
    """Equal except for rounding."""
    client: str
    server: str


def compared(client: str, server: str) -> ComparedTable:
    """Compare facts that are not equal. A client's may be malformed."""
    (form, _, reported), (own_form, _, own) = _three(client), _three(server)
    if form != own_form:
        return ComparedTable(False, form[:60], own_form)
    if reported == "-" or own == "-" or len(reported) > 2 * len(own) + 100:
        return ComparedTable(False, "other values", "its own")
    try:
        theirs, mine = _read(reported), _read(own)
    except ValueError:
        return ComparedTable(False, "values that cannot be read", "its own")
    if theirs.form != mine.form or not np.isfinite(theirs.sample).all():
        return ComparedTable(False, "other values", "its own")
    with np.errstate(over="ignore"):
        apart = np.abs(theirs.sample - mine.sample) / _allowed(own_form, mine, theirs.narrow)
    worst = int(apart.argmax())
    alike = bool(apart[worst] <= 1)
    if alike and _half(own_form) is not None:
        flipped = int((theirs.sample != mine.sample)[1 : 1 + mine.spots].sum())
        alike = flipped <= max(_share(mine) * mine.spots, 1)
    return ComparedTable(alike, f"{theirs.sample[worst]:.9g}", f"{mine.sample[worst]:.9g}")


@dataclass(frozen=True)
class _Sample:
    odd: str
    narrow: bool
    spots: int
    sample: NDArray[np.float64]

    @property
    def form(self) -> tuple[str, int, int]:
        return self.odd, self.spots, len(self.sample)

    @property
    def has_both_signs(self) -> bool:
        return bool((self.sample[1:] < 0).any() and (self.sample[1:] > 0).any())


def _allowed(form: str, mine: _Sample, narrow: bool) -> NDArray[np.float64]:
    """Return how far the client's may differ from each of these values: by rounding, and not by another number in a
    formula.
    """
    eps, largest = 2.0**-23 if narrow and mine.narrow else 2.0**-52, mine.sample[0]
    shape = [int(size) for size in form.partition("[")[2].rstrip("]").split(",") if size]
    angles = min(max(shape, default=0), LONGEST) if mine.has_both_signs else 0
    allowed: NDArray[np.float64] = eps * (ULPS * np.abs(mine.sample) + (FEW + angles) * largest) + 1e-300
    if (half := _half(form)) is not None:
        end = 1 + mine.spots
        # the neighbouring value, which is up to `eps` away
        allowed[:end] += half.eps * np.abs(mine.sample[:end]) + half.smallest_normal * half.eps
        allowed[end:] += _share(mine) * half.eps * largest
    return allowed


def _share(mine: _Sample) -> float:
    """Return the share of values that may be rounded to another neighbour."""
    return 25 * FLIPPED if mine.has_both_signs else FLIPPED


def _half(form: str) -> torch.finfo | None:
    """Return the type of a table whose values have fewer bits than they were computed with; else None."""
    dtype = getattr(torch, form.partition("[")[0], None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4:
        return torch.finfo(dtype)
    return None


def _three(fact: str) -> tuple[str, str, str]:
    form, _, rest = fact.partition(" ")
    exact, _, reported = rest.partition(" ")
    return form, exact, reported


def _read(reported: str) -> _Sample:
    """Parse a sample. Raises ValueError."""
    odd, width, spots, text = reported.split(":")
    sample = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4" if width == "single" else "<f8")
    if not len(sample):
        raise ValueError("no values")
    return _Sample(odd, width == "single", int(spots), sample.astype(np.float64))
