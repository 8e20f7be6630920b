"""Takes out of an image what nobody runs there: ``python trim.py FOLDER`` (site-packages).

Tests of libraries; torch's own test programs, and its headers, which only a compiler reads: an image has none.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

TESTS = ("test", "tests")
UNUSED = ("torch/include", "torch/share")
RUN = "torch_shm_manager"
"""The program in torch/bin that stays: it starts with tensors in shared memory."""


def trim(packages: Path) -> int:
    """Bytes that were freed. A folder below one that goes is not asked for."""
    going = [packages / name for name in UNUSED]
    going += [path for path in packages.rglob("*") if path.is_dir() and path.name in TESTS]
    going += [path for path in packages.glob("torch/bin/*") if path.name != RUN]
    going += [*packages.glob("torch/lib/*_test.so"), *packages.glob("torch/lib/*.a")]
    freed = 0
    for path in going:
        if path.is_dir() and not path.is_symlink():
            freed += sum(one.lstat().st_size for one in path.rglob("*") if not one.is_dir())
            shutil.rmtree(path)
        elif path.exists():
            freed += path.lstat().st_size
            path.unlink()
    return freed


if __name__ == "__main__":
    print(f"trim: {trim(Path(sys.argv[1])) / 2**20:.0f} MiB of tests and headers")
