"""The images that are shipped with `digits`, some of them in a folder of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "shared_hooks" / "models" / "digits" / "images"


def folder_of(folder: Path, count: int, pattern: str = "*.png") -> Path:
    """``folder``, made, with the first ``count`` images whose names fit ``pattern``."""
    folder.mkdir()
    for path in sorted(IMAGES.glob(pattern))[:count]:
        shutil.copy(path, folder)
    return folder
