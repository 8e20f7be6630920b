"""The tokenizer that a spec names: ``module:callable``, or a folder that ``transformers`` reads. No downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared_hooks.config import kind_of, looks_like_target, resolve
from shared_hooks.errors import IsthmusError, SpecError


def load_tokenizer(reference: str, folder: Path, where: str) -> Any:
    """An object with ``decode`` or ``convert_ids_to_tokens``. ``where`` opens the messages. Raises SpecError."""
    made = _made(reference, folder, where) if looks_like_target(reference) else _read(folder / reference, where)
    if not any(callable(getattr(made, name, None)) for name in ("decode", "convert_ids_to_tokens")):
        raise SpecError(
            f'{where}: "{reference}" gave {kind_of(made)}, which has no decode and no convert_ids_to_tokens'
        )
    return made


def _made(reference: str, folder: Path, where: str) -> Any:
    make = resolve(reference, folder, where)
    try:
        return make()
    except IsthmusError:
        raise
    except Exception as error:
        raise SpecError(f'{where}: "{reference}" raised {type(error).__name__}: {error}') from error


def _read(path: Path, where: str) -> Any:
    if not path.is_dir():
        raise SpecError(f'{where}: expected "module:callable" or a folder that AutoTokenizer reads; no folder {path}')
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise SpecError(f"{where}: a folder needs transformers: {error}") from error
    try:
        # code in the folder is not run
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise SpecError(f"{where}: {path}: {type(error).__name__}: {error}") from error
