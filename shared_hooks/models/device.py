"""``--device auto|cpu|cuda[:n]`` and ``--threads N``, the same on both sides."""

from __future__ import annotations

import torch

from shared_hooks.errors import SpecError


def pick_device(name: str = "auto") -> torch.device:
    """The device called ``name``; "auto" is the first CUDA device, or the CPU where there is none.

    Raises SpecError for a name of another form, and for a CUDA device that this machine or this torch does not have.
    """
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    kind, colon, index = name.partition(":")
    if kind != "cuda" or (colon and not (index.isascii() and index.isdigit())):
        raise SpecError(f'device {name!r} is not known; expected "auto", "cpu", "cuda" or "cuda:N"')
    if not count:
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        raise SpecError(f'device {name!r} is not available: {reason} (torch {torch.__version__}); use "cpu" or "auto"')
    number = int(index) if colon else 0
    if number >= count:
        raise SpecError(f"device {name!r} is not available: this machine has {count} CUDA device(s), counted from 0")
    return torch.device("cuda", number)


MOST_THREADS = 1024


def set_threads(count: int | None) -> int:
    """Let torch use ``count`` threads inside one operation on the CPU; None leaves torch's choice. Returns the number.

    Results are bit-identical only with the same number of threads on both sides. Raises SpecError
    below 1 and above `MOST_THREADS`.
    """
    if count is not None:
        if not 1 <= count <= MOST_THREADS:  # OpenMP ends the process where it has no memory for them
            raise SpecError(f"threads must be 1 to {MOST_THREADS}, not {count}")
        torch.set_num_threads(count)
    return torch.get_num_threads()
