"""The states of random number generators that cross a cut: what the tail draws must be what the whole model would.

Torch's own generator of the CPU arrives as it is at the cut; Python's and NumPy's as they are when the forward begins,
because the tail repeats the model's Python from there. The server's own are put back when the tail is done. They are
one for the whole process, so tails that draw run one at a time.
"""

from __future__ import annotations

import json
import random
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from shared_hooks import devices
from shared_hooks.errors import BadFrame

_lock = threading.RLock()


def _python_now() -> torch.Tensor:
    return _bytes(json.dumps(random.getstate()).encode())


def _python_set(state: torch.Tensor) -> None:
    version, key, gauss = json.loads(_text(state))
    _check_words(key[:_WORDS])
    random.setstate((version, tuple(key), gauss))


def _numpy_now() -> torch.Tensor:
    return _numpy_state(np.random.get_state(legacy=False))  # noqa: NPY002  # what models draw from


def _numpy_state(state: Any) -> torch.Tensor:
    inner = state["state"]
    numbers = [[int(number) for number in inner["key"]], int(inner["pos"]), state["has_gauss"], state["gauss"]]
    return _bytes(json.dumps(numbers).encode())


def _numpy_set(state: torch.Tensor) -> None:
    key, position, has_gauss, gauss = json.loads(_text(state))
    if type(position) is not int or not 0 <= position <= _WORDS or len(key) != _WORDS:
        raise ValueError("NumPy does not look where the next number is taken from")
    _check_words(key)
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), int(position), int(has_gauss), float(gauss)))  # noqa: NPY002


_WORDS = 624
"""Words of a Mersenne Twister."""
_LEFT_AND_NEXT = struct.Struct("<8xi4xQ")
"""After the seed: numbers left until the words are made again, whether it was seeded, place of the next; the words."""


def _check_words(words: Sequence[int]) -> None:
    """Refuse a state of zeros, for which a Mersenne Twister returns zeros for ever, so that rejection sampling (normal,
    gamma) never ends, in code that cannot be interrupted. Of the first word only the highest bit counts.
    """
    if not any(words[1:]) and not words[0] & 0x8000_0000:
        raise ValueError("a state of zeros gives nothing but zeros")


def _torch_checked(state: bytes) -> torch.Tensor:
    """Check a state more strictly than torch, which reads out of bounds if both of its numbers are large."""
    if len(state) < _LEFT_AND_NEXT.size + 8 * _WORDS:
        raise ValueError("a state of torch's generator is longer")
    left, following = _LEFT_AND_NEXT.unpack_from(state)
    if left + following > _WORDS + 1:
        raise ValueError("more numbers are left than there are words after the next one")
    _check_words(struct.unpack_from(f"<{_WORDS}Q", state, _LEFT_AND_NEXT.size))
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _torch_set(state: torch.Tensor) -> None:
    devices.set_rng_state(_torch_checked(_text(state)))


def torch_generator(state: bytes) -> torch.Generator:
    """Return a torch generator of the CPU in this state. Raises ValueError, and RuntimeError from torch's own
    checks.
    """
    made = torch.Generator()
    made.set_state(_torch_checked(state))
    return made


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _text(state: torch.Tensor) -> bytes:
    return bytes(state.cpu().numpy().tobytes())


_GENERATORS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]] = {
    "torch": (devices.rng_state, _torch_set),
    "python": (_python_now, _python_set),
    "numpy": (_numpy_now, _numpy_set),
}
AT_CUT = "torch"
ALL = tuple(_GENERATORS)


def now(names: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Return the states of these generators, uint8."""
    return tuple(_GENERATORS[name][0]() for name in names)


def fresh(names: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """States with new seeds, for a run of a model without generators of its own."""
    seed = secrets.randbits(32)
    made = {
        "torch": lambda: torch.Generator().manual_seed(seed).get_state(),
        "python": lambda: _bytes(json.dumps(random.Random(seed).getstate()).encode()),
        "numpy": lambda: _numpy_state(np.random.RandomState(seed).get_state(legacy=False)),  # as below
    }
    return tuple(made[name]() for name in names)


def fingerprint(but: Sequence[str], device: torch.device) -> dict[str, object]:
    """Changes if any generator moves, except those named in ``but``; takes some tens of microseconds."""
    found: dict[str, object] = {}
    if "torch" not in but:
        found["torch"] = _text(devices.rng_state())
    if not devices.is_host(device):
        found[str(device)] = _text(devices.rng_state(device))
    if "python" not in but:
        found["python"] = random.getstate()
    if "numpy" not in but:
        state: Any = np.random.get_state()  # noqa: NPY002  # as a dictionary it takes ten times as long
        found["numpy"] = state[1].tobytes(), *state[2:]
    return found


def kept(names: Sequence[str], *, alone: bool = False) -> AbstractContextManager[None]:
    """Return a context in which generators may be set: afterwards they are as they were. ``alone``: no other thread
    sets any meanwhile, even if ``names`` is empty, so that `fingerprint` tells of this thread's draws only.
    """
    return _kept(names) if names or alone else nullcontext()


@contextmanager
def _kept(names: Sequence[str]) -> Iterator[None]:
    with _lock:
        before = now(names)
        try:
            yield
        finally:
            restore(names, before)


def restore(names: Sequence[str], states: Sequence[torch.Tensor]) -> None:
    """Set the generators to these states. Raises `BadFrame` for what is none."""
    for name, state in zip(names, states, strict=True):
        try:
            _GENERATORS[name][1](state)
        except (RuntimeError, TypeError, ValueError, IndexError, OverflowError, RecursionError, struct.error) as error:
            raise BadFrame(f"not the state of {name}'s random number generator") from error


def at_cut(names: Sequence[str], states: Sequence[torch.Tensor]) -> None:
    """The cut is reached: torch's generator continues from where the head left it."""
    if AT_CUT in names:
        number = list(names).index(AT_CUT)
        restore(names[number : number + 1], states[number : number + 1])
