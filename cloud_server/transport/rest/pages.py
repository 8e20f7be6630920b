"""A folder of the operator's, served under ``/try``: a page that calls this server from a browser (docs/doors.md).

Only files of known kinds that existed when the server started are served; a request's path is only looked up among
their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shared_hooks.errors import SpecError

KINDS: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".json": b"application/json",
    ".wasm": b"application/wasm",
    ".onnx": b"application/octet-stream",
    ".bin": b"application/octet-stream",
    ".png": b"image/png",
}
MOST_FILES: Final = 4096
MOST_BYTES: Final = 256 << 20
"""The size limit of a file."""
POLICY: Final = (
    b"default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; style-src 'self'; "
    b"connect-src 'self'; img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""A page loads nothing from, and sends nothing to, other origins."""
HEADERS: Final = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class Pages:
    """The served files. Raises SpecError for a folder that does not exist, has no index.html, or more than `MOST_FILES`
    files.
    """

    def __init__(self, folder: Path) -> None:
        root = folder.resolve()
        if not (root / "index.html").is_file():
            raise SpecError(f"rest: {folder} has no index.html to show under /try")
        self._files: dict[tuple[str, ...], Path] = {}
        self._read: dict[Path, tuple[tuple[int, int], bytes]] = {}
        """Contents by file, with its size and modification time; shared by all requests."""
        for path in sorted(root.rglob("*")):
            real = path.resolve()
            if path.suffix in KINDS and real.is_file() and real.is_relative_to(root):
                self._files[path.relative_to(root).parts] = real
                if len(self._files) > MOST_FILES:
                    raise SpecError(f"rest: more than {MOST_FILES} files in {folder}: is that the folder of a page?")

    def find(self, path: Sequence[str]) -> tuple[bytes, bytes] | None:
        """Return a file's kind and bytes, by the parts of the path after ``/try``; None if there is no such file."""
        file = self._files.get(("index.html",) if list(path) in ([], [""]) else tuple(path))
        if file is None:
            return None
        try:
            about = file.stat()
            if about.st_size > MOST_BYTES:
                return None
            stamp = about.st_size, about.st_mtime_ns
            if self._read.get(file, (None, b""))[0] != stamp:
                self._read[file] = stamp, file.read_bytes()
            return KINDS[file.suffix], self._read[file][1]
        except OSError:
            return None
