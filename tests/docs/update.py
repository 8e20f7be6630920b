"""``make docs-update``: what pages show of outputs, as it comes out now. Arguments: pages; none: all.

Lines that a page leaves out (``...``) stay left out where what it shows still comes; else all of the output goes in,
to be shortened by hand.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.docs.pages import ROOT, Block, blocks, pages
from tests.docs.reader import Output, Reader
from tests.docs.serving import a_server
from tests.docs.shapes import refreshed


def main(arguments: list[str]) -> None:
    wanted = [Path(name).resolve() for name in arguments] or list(pages())
    with tempfile.TemporaryDirectory() as folder, a_server(Path(folder)) as ports:
        for page in wanted:
            found = list(_outputs(page, ports))
            lines = page.read_text(encoding="utf-8").splitlines()
            for output in reversed(found):  # so that the numbers of lines before it still hold
                first = output.block.line
                varies = output.block.notes.get("varies", "")
                shown = refreshed(output.block.text, output.text, varies).splitlines()
                lines[first : first + len(output.block.text.splitlines())] = shown
            page.write_text("\n".join(lines) + "\n", encoding="utf-8")
            if found:
                print(f"{page.relative_to(ROOT)}: {len(found)} outputs")


def _outputs(page: Path, ports: Mapping[str, str]) -> Iterator[Output]:
    with tempfile.TemporaryDirectory() as folder, Reader(Path(folder), ports) as reader:
        for block in blocks(page):
            output = _demo(block) if block.text.startswith("$ make demo") else reader.follow(block)
            if output is not None:
                yield output


def _demo(block: Block) -> Output:
    """Two processes, as `make demo` runs them; nothing else here takes one."""
    command = [sys.executable, "-m", "deploy.demo"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return Output(block, f"$ make demo\n{ran.stdout}")


if __name__ == "__main__":
    main(sys.argv[1:])
