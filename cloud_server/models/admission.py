"""What a request announces, checked without its model: before anything is allocated, and before a worker has it."""

from __future__ import annotations

import torch

from cloud_server.models.engine import Identity
from shared_hooks import Crossing
from shared_hooks.codecs import Bound
from shared_hooks.crossing import ALIGN, Parcel, Section, read_header
from shared_hooks.errors import BadFrame, Disagreement, TooLarge
from shared_hooks.models.uploads import check_suffix, libraries

MAX_SECTION_BYTES = 2 << 10
"""What a parcel's header says of one tensor; reading a header holds up everybody."""
MAX_VALUES_BYTES = 1 << 20
"""The rest of a header: where slots begin, and values that were read from data."""
MAX_LISTS = 32_768
"""In these values: a MiB of empty lists takes a hundred times as long to read as a MiB of numbers."""
SECTION_LISTS = 8
MAX_STATE_BYTES = 64 << 10
"""Most for the state of a random number generator; in JSON they take a tenth of it."""


def check_frontier(crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
    """Do header and cut speak of the same bytes? Raises BadFrame or TooLarge."""
    pieces = len(crossing.grains)
    tensors = pieces + len(crossing.generators)
    longest = MAX_VALUES_BYTES + tensors * MAX_SECTION_BYTES
    if len(header) > longest:
        raise TooLarge(f"a header of {len(header)} bytes for {tensors} tensors; at most {longest} are taken")
    lists = header.count(b"[") + header.count(b"{")
    if lists > MAX_LISTS + tensors * SECTION_LISTS:
        raise TooLarge(f"a header with {lists} lists; at most {MAX_LISTS} and {SECTION_LISTS} a tensor are taken")
    sections = _sections(header, payload_bytes, max_bytes, crossing.bound)
    states = sum([section.raw_bytes for section in sections[pieces:]])
    if states > len(crossing.generators) * MAX_STATE_BYTES:
        raise TooLarge(f"{states} bytes of generators' states; at most {MAX_STATE_BYTES} each are taken")
    decoded = sum([section.raw_bytes for section in sections[:pieces]])
    if decoded != crossing.payload_bytes:
        raise BadFrame(f"the header describes {decoded} bytes of tensors, the cut {crossing.payload_bytes}")


def check_open(crossing: Crossing, header: bytes, most_bytes: int) -> None:
    """Whether there is room for the cut of a request whose header is still to come, and no more. Raises BadFrame,
    TooLarge.
    """
    if header:
        raise BadFrame("a request that is open has no header yet")
    states = len(crossing.generators)
    tensors = states + len(crossing.grains)
    room = crossing.payload_bytes + states * MAX_STATE_BYTES + 2 * ALIGN * tensors
    if not 0 < most_bytes <= room:
        raise TooLarge(f"an open request of up to {most_bytes} bytes at a cut that takes {room} at most")


def check_step(header: bytes, payload_bytes: int, max_bytes: int) -> None:
    """Do header and payload of a step speak of the same bytes? Raises BadFrame or TooLarge."""
    if len(header) > MAX_VALUES_BYTES:
        raise TooLarge(f"a header of {len(header)} bytes for a step; at most {MAX_VALUES_BYTES} are taken")
    if (lists := header.count(b"[") + header.count(b"{")) > MAX_LISTS:
        raise TooLarge(f"a header with {lists} lists for a step; at most {MAX_LISTS} are taken")
    if header:
        _sections(header, payload_bytes, max_bytes)
    elif payload_bytes:
        raise BadFrame(f"a payload of {payload_bytes} bytes, and no header that says of what")


def check_file(
    identity: Identity, suffix: str, preprocess_digest: str, header: bytes, payload_bytes: int, max_bytes: int
) -> None:
    """Do both sides read files alike, and is the payload one file? Raises BadFrame, TooLarge, InputMismatch or
    Disagreement.
    """
    check_suffix(suffix)
    if len(header) > MAX_SECTION_BYTES:
        raise TooLarge(f"a header of {len(header)} bytes for a file; at most {MAX_SECTION_BYTES} are taken")
    if preprocess_digest != identity.preprocess_digest:
        raise Disagreement(
            f'preprocessing of model "{identity.model_id}": client {preprocess_digest[:80]!r}, server '
            f'"{identity.preprocess_digest}" (settings, code, or libraries; the server has {_decoders()})'
        )
    sections = _sections(header, payload_bytes, max_bytes)
    if len(sections) != 1 or sections[0].dtype is not torch.uint8 or len(sections[0].shape) != 1:
        raise BadFrame("a file comes as one tensor of bytes")


def _sections(header: bytes, payload_bytes: int, max_bytes: int, bound: Bound = ()) -> list[Section]:
    """What a header says of its tensors; it is read once. ``bound``: as in `Parcel.tensors`."""
    _, sections = read_header(header, bound)
    announced = Parcel.bounded(sections, max_bytes)
    if announced != payload_bytes:
        raise BadFrame(f"a payload of {payload_bytes} bytes is announced, its header describes {announced}")
    return sections.each


def _decoders() -> str:
    return ", ".join(f"{name} {version}" for name, version in libraries().items())
