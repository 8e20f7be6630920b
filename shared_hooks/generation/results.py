"""A model's result on the wire. A state in it is named, not sent; so is a tensor that the edge has.

["s", number] the tensor of that number in the message ["in", number] an input ["call", path, count, number] the result
of a call before the cut ["top" ...], ["token" ...], ["drawn" ...]
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from enum import Enum
from threading import Lock
from typing import Any

import torch

from shared_hooks import devices
from shared_hooks.crossing import torch_generator
from shared_hooks.errors import MALFORMED, BadFrame, CutRefused
from shared_hooks.generation.bank import Line
from shared_hooks.generation.hidden import is_state
from shared_hooks.generation.remote_tensor import Origin, RemoteTensor, ResultPart, value_of
from shared_hooks.tensors import ClassFinder, class_name, dtype_name, dtype_named, flatten, unflatten

# What of the logits comes back. All of them are the largest bytes on the wire: of 150,000 words 600 KB a token.
#
#     None              all of them
#     ["top", k]        those among the k largest after a temperature was applied; all others are minus infinity
#     ["token"]         the largest at each position: logits in which that word is likeliest, and no more is known
#     ["sample", [...]] the word that was drawn at the last position by these processors (`sampling`)
#
# The leaves of an answer (`results`): ``["top" | "token" | "drawn", shape, dtype]`` and the numbers of its tensors.


Answer = tuple[Any, ...] | None
LOGITS = "logits"
SHORT = ("top", "token", "drawn")
Short = Callable[[str, torch.Tensor], Any]
Draw = Callable[[Any, torch.Tensor], torch.Tensor]
MOST_LOGITS = 1 << 32
_NOTHING = float("-inf")


def shortened(wanted: Any, draw: Draw) -> Short:
    """Return the data for `results.packed_result`. ``draw`` samples with processors, from float32 scores of shape
    (rows, words). Raises BadFrame.
    """
    if wanted is None:
        return lambda name, tensor: None
    kind, *details = wanted if isinstance(wanted, list) and wanted else [None]
    most = details[0] if details and type(details[0]) is int else 0
    short: Callable[[torch.Tensor], Any]
    if kind == "top" and len(details) == 1 and most > 0:
        short = functools.partial(_top, most=most)
    elif kind == "token" and not details:
        short = _token
    elif kind == "sample" and len(details) == 1:
        short = functools.partial(_drawn, draw=draw, processors=details[0])
    else:
        raise BadFrame(f"no such answer: {wanted!r:.60}")
    return lambda name, tensor: short(tensor) if name == LOGITS and tensor.dim() > 1 and tensor.numel() else None


def _top(logits: torch.Tensor, most: int) -> Any:
    """Return the k likeliest, ties with the k-th, and what a division by a temperature may make a tie. If that is much,
    all is sent.
    """
    words = logits.shape[-1]
    if 2 * most >= words:
        return None
    scores = logits.to(torch.float32)
    last = scores.topk(most, -1).values[..., -1:]
    # numbers that one division may make equal differ by 2^-23 of themselves; NaN is below nothing
    bound = torch.where(last.isfinite(), last - last.abs() * 2.0**-20 - 1e-30, last)
    count = int((~(scores < bound)).sum(-1).max())
    if 2 * count >= words:
        return None
    values, found = logits.topk(count, -1)
    return ["top", list(logits.shape), dtype_name(logits.dtype)], [values, found.to(torch.int32)]


def _token(logits: torch.Tensor) -> Any:
    found = logits.to(torch.float32).argmax(-1)
    return ["token", list(logits.shape), dtype_name(logits.dtype)], [found.to(torch.int32)]


def _drawn(logits: torch.Tensor, draw: Draw, processors: Any) -> Any:
    if logits.dim() != 3:
        return None
    found = draw(processors, logits[:, -1].to(device="cpu", dtype=torch.float32))
    return ["drawn", list(logits.shape), dtype_name(logits.dtype)], [found.to(torch.int32)]


def widened(leaf: Any, tensors: list[torch.Tensor], most_words: int) -> torch.Tensor:
    """Return the logits on the edge: what was sent, and minus infinity elsewhere. ``most_words``: the model's
    vocabulary.

    Raises BadFrame, before memory is taken for an answer that is not this model's.
    """
    kind, shape, dtype, first = leaf
    try:
        sent = tuple(tensors[first].shape)
        rows = sent[:-1] if kind == "top" else sent
        fits = sent == (shape[0],) and len(shape) == 3 if kind == "drawn" else tuple(shape[:-1]) == rows
        if not fits or not 0 < shape[-1] <= most_words or math.prod(shape) > MOST_LOGITS:
            raise BadFrame(f"an answer says that its logits are {shape!r:.60}, which is none of this model's")
        whole = torch.full(shape, _NOTHING, dtype=dtype_named(dtype))
        if kind == "top":
            return whole.scatter_(-1, tensors[first + 1].long(), tensors[first])
        words = tensors[first].long()[..., None]
        (whole if kind == "token" else whole[:, -1]).scatter_(-1, words, 0.0)
    except RuntimeError as error:
        raise BadFrame(f"the words of an answer do not fit its logits: {error!s:.120}") from error
    return whole


# Sampling by the tail, as ``generate()`` samples: transformers' own processors, softmax, ``torch.multinomial``.
#
# The edge sends the state of torch's generator once. It then draws from logits in which one token alone is possible:
# that gives this token, and takes as many random numbers as the tail took. So both generators advance alike, and the
# edge finds everything as if it had sampled by itself. After each step the tail reports a digest of its generator's
# state; where the edge's own differs (other code drew from it), it sends the state again.
#
# Sampling reveals the tokens: with this the server knows the answer, where otherwise it knows how likely each token
# was. It runs on the CPU alone, because other devices have generators of their own.


Processors = tuple[tuple[Any, ...], ...]
PROCESSORS: dict[str, tuple[str, ...]] = {
    "TemperatureLogitsWarper": ("temperature",),
    "TopKLogitsWarper": ("top_k",),
    "TopPLogitsWarper": ("top_p", "min_tokens_to_keep"),
    "MinPLogitsWarper": ("min_p", "min_tokens_to_keep"),
}
"""transformers' processors that look only at the scores, and the numbers that they are made of."""
MOST_PROCESSORS = 16


def described(processors: Any) -> Processors | None:
    """Processors as their classes' names and numbers; None if one is of another kind."""
    found = []
    for one in processors:
        cls = type(one)
        if not is_own(cls) or cls.__name__ not in PROCESSORS or getattr(one, "filter_value", _LOWEST) != _LOWEST:
            return None
        numbers = [getattr(one, name) for name in PROCESSORS[cls.__name__]]
        if any(type(number) not in (int, float) for number in numbers):
            return None
        found.append((cls.__name__, *numbers))
    return tuple(found)


_LOWEST = float("-inf")


def is_own(cls: type) -> bool:
    """Return whether a class is one of transformers' own processors."""
    return cls.__module__ == "transformers.generation.logits_process"


def state_now() -> bytes:
    """Return the state of torch's CPU generator."""
    return devices.rng_state().numpy().tobytes()


def digest(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=8).hexdigest()


def written(state: bytes) -> str:
    """Return a generator's state for JSON."""
    return base64.b64encode(state).decode()


class TailSampler:
    """The tail's side of sampling: draws with the generator whose state the edge sent, and keeps the state after it."""

    def __init__(self, state: bytes | None = None) -> None:
        self.state = state
        self.drawn = False
        """Whether the last step has drawn."""

    def take(self, reported: Any) -> None:
        """Take the edge's generator state. Raises BadFrame."""
        try:
            self.state = base64.b64decode(reported, validate=True)
            torch_generator(self.state)
        except (*MALFORMED, RuntimeError) as error:
            raise BadFrame(f"no state of a generator: {error!s:.120}") from error

    def draw(self, processors: Any, scores: torch.Tensor) -> torch.Tensor:
        """Return a token for each row of scores (rows, words). Raises BadFrame, CutRefused without transformers."""
        if self.state is None:
            raise BadFrame("a word is to be drawn, and no state of a generator was sent")
        for one in _made(processors):
            scores = one(None, scores)
        generator = torch_generator(self.state)
        found = torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), 1, generator=generator)
        self.state, self.drawn = generator.get_state().numpy().tobytes(), True
        return found.squeeze(1)

    def copied(self) -> TailSampler:
        """Return a copy for a step that may fail."""
        return TailSampler(self.state)


def _made(reported: Any) -> list[Any]:
    try:
        from transformers.generation import logits_process
    except ImportError as error:
        raise CutRefused(f"this side cannot sample: {error}") from error
    if not isinstance(reported, list) or len(reported) > MOST_PROCESSORS:
        raise BadFrame(f"no such processors: {reported!r:.60}")
    made = []
    for one in reported:
        name, *numbers = one if isinstance(one, list) and one and isinstance(one[0], str) else [""]
        names = PROCESSORS.get(name, ())
        if not names or len(names) != len(numbers) or any(type(number) not in (int, float) for number in numbers):
            raise BadFrame(f"no such processor: {one!r:.60}")
        try:
            made.append(getattr(logits_process, name)(**dict(zip(names, numbers, strict=True))))
        except MALFORMED as error:
            raise BadFrame(f"{name}: {error!s:.160}") from error
    return made


STATE = 0


_DICTIONARIES = frozenset(map(class_name, (dict, OrderedDict, defaultdict)))
"""Classes of results that are sent as plain dictionaries."""


def _parts(output: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return the container of a result (a class's name, or a kind), and its parts by key."""
    if isinstance(output, dict):
        return class_name(type(output)), list(output.items())
    if type(output) in (tuple, list):
        return type(output).__name__, list(enumerate(output))
    return "", [(0, output)]


def packed_result(
    output: Any, inputs: list[torch.Tensor], short: Callable[[str, torch.Tensor], Any]
) -> tuple[Any, list[Any], list[torch.Tensor]]:
    """(structure, leaves, tensors) of a result.

    ``short`` returns, for a tensor and its name, what is sent instead: a leaf and tensors, or None. Raises `RemoteRead`
    for a remote tensor that cannot be named.
    """
    holder, parts = _parts(output)
    given = {id(tensor): number for number, tensor in enumerate(inputs)}
    structure, leaves = [], []
    tensors: list[torch.Tensor] = []
    for key, value in parts:
        if is_state(value):
            structure.append([key, STATE])
            continue
        part, found = flatten(value)
        structure.append([key, part, len(found)])
        for tensor in found:
            leaves.append(_leaf(tensor, str(key), given, tensors, short))
    return [holder, structure], leaves, tensors


def _leaf(
    tensor: torch.Tensor,
    name: str,
    given: dict[int, int],
    tensors: list[torch.Tensor],
    short: Callable[[str, torch.Tensor], Any],
) -> Any:
    if id(tensor) in given:
        return ["in", given[id(tensor)]]
    if type(tensor) is RemoteTensor:
        origin = tensor.origin
        if isinstance(origin, Origin) and origin.kind == "call":
            return ["call", origin.path, origin.count, origin.number]
        if isinstance(origin, ResultPart) or origin is None:
            tensor = value_of(tensor, f'"{name}" of the result')
        elif origin.kind == "input":
            return ["in", origin.number]
        else:
            value_of(tensor, f'"{name}" of the result')  # raises: it is part of a state, and is not returned
    instead = short(name, tensor)
    if instead is not None:
        leaf, extra = instead
        tensors += extra
        return [*leaf, len(tensors) - len(extra)]
    tensors.append(tensor)
    return ["s", len(tensors) - 1]


def unpacked_result(
    structure: Any, leaves: Any, find: ClassFinder, leaf: Callable[[Any], torch.Tensor], state: Any
) -> Any:
    """Return the result on the edge. ``leaf`` finds the tensor of one leaf. Raises BadFrame."""
    try:
        holder, parts = structure
        values = iter([leaf(one) for one in leaves])
        found = [(key, state if rest[0] == STATE else _part(rest, values, find)) for key, *rest in parts]
    except (*MALFORMED, StopIteration) as error:
        raise BadFrame(f"malformed answer to a step: {error!s:.120}") from error
    if holder == "":
        return found[0][1]
    if holder in ("tuple", "list"):
        items = [value for _, value in found]
        return tuple(items) if holder == "tuple" else items
    cls = find(holder)
    if cls is None and holder not in _DICTIONARIES:
        raise BadFrame(f"the answer to a step is of a class that this model does not have: {holder!r:.80}")
    return dict(found) if cls is None else cls(**dict(found))


def _part(rest: Any, values: Iterator[torch.Tensor], find: ClassFinder) -> Any:
    part, count = rest
    return unflatten(part, [next(values) for _ in range(count)], find)


# What is known of one model and cut, independent of shapes: how the tail treats each outermost call before the cut.
#
# *Skipped*: its result depends on private inputs; the tail has its form from the edge, and remote tensors. *Entered*:
# its result can be computed here (positions, masks); the tail runs it. Which of the two applies is found by running
# it on remote tensors, once.


class AnswerKind(Enum):
    SKIPPED = "skipped"
    ENTERED = "entered"


class Template:
    """How the modules before a cut are replayed; shared by all sessions."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, int], AnswerKind] = {}
        """By path and count, for the calls that were tried."""
        self.written: set[Line] = set()
        """Lines of the code around the cut that create tensors into which remote values are written."""
        self._lock = Lock()

    def learn(self, path: str, count: int, kind: AnswerKind) -> None:
        """Record how a call is replayed. What is skipped once is always skipped: the edge reports its result."""
        with self._lock:
            if self.kinds.get((path, count)) is not AnswerKind.SKIPPED:
                self.kinds[path, count] = kind
