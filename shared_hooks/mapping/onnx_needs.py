"""The libraries that only ONNX files need, and the error where they are missing or an export fails."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from torch.fx import traceback

from shared_hooks.errors import SpecError

NEEDED: Final = ("onnx", "onnx_ir", "onnxscript", "onnxruntime")


class ExportFailed(SpecError):
    """The model cannot be written as ONNX, or not in this way; the message says why."""


def check(*names: str) -> None:
    """SpecError, before any work is done, naming what is missing and how to get it."""
    missing = [name for name in names or NEEDED if find_spec(name) is None]
    if missing:
        raise SpecError(f'{" and ".join(missing)} missing: pip install "isthmus[onnx]"')
    if not hasattr(traceback, "annotate"):
        raise SpecError("this torch cannot label what it exports: ONNX files need torch 2.9 or newer")
