"""What the Dockerfiles run, and what they are built from."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from deploy.image.pins import pins
from deploy.image.sbom import sbom
from deploy.image.trim import trim

ROOT = Path(__file__).parents[2]
PINS = ["# pins", "torch==2.13.0", 'numpy==2.4.6; python_version >= "3.11"', "prometheus-client==0.26.0", ""]


def test_a_plain_base_is_held_to_the_file() -> None:
    assert list(pins(PINS, {"pip": "25.0", "numpy": "1.26.4"})) == PINS


def test_a_base_with_a_torch_keeps_it_and_the_numpy_it_was_built_with() -> None:
    found = list(pins(PINS, {"torch": "2.8.0a0+5228986c39.nv25.6", "numpy": "1.26.4", "prometheus-client": "0.1"}))
    assert found == [
        "torch==2.8.0a0+5228986c39.nv25.6",
        "numpy==1.26.4",
        "# pins",
        "prometheus-client==0.26.0",  # nothing of it is compiled against torch: the tested one
        "",
    ]


def test_another_build_of_torch_may_be_asked_for_but_not_instead_of_the_bases() -> None:
    assert list(pins(PINS, {}, "2.13.0+cpu"))[:2] == ["torch==2.13.0+cpu", "# pins"]
    with pytest.raises(ValueError, match=r"brings torch 2\.8\.0a0\+x, so it cannot be 2\.13\.0\+cpu"):
        list(pins(PINS, {"torch": "2.8.0a0+x"}, "2.13.0+cpu"))


def test_trimmed_are_tests_and_what_only_a_compiler_reads(tmp_path: Path) -> None:
    gone = ["torch/include/a.h", "torch/test/a", "torch/bin/test_api", "torch/lib/libx_test.so", "numpy/lib/tests/t.py"]
    stays = ["torch/bin/torch_shm_manager", "torch/lib/libtorch.so", "torch/testing/a.py", "jinja2/tests.py"]
    for name in [*gone, *stays]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    assert trim(tmp_path) == 5 * len(gone)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(stays)


def test_the_bill_of_materials_names_what_imports_find_first() -> None:
    def one(name: str, version: str, licence: str = "") -> Distribution:
        class Known(Distribution):
            def read_text(self, filename: str) -> str | None:
                more = f"License-Expression: {licence}\n" if licence else ""
                return f"Name: {name}\nVersion: {version}\n{more}\n" if filename == "METADATA" else None

            def locate_file(self, path: Any) -> Any:
                raise NotImplementedError

        return Known()

    found = sbom([one("My_Pack", "2", "MIT"), one("my-pack", "1"), one("a", "3")])
    assert [(each["purl"], each.get("licenses")) for each in found["components"]] == [
        ("pkg:pypi/a@3", None),
        ("pkg:pypi/my-pack@2", [{"expression": "MIT"}]),
    ]


@pytest.mark.parametrize("side", ["cloud", "edge"])
def test_copied_files_are_in_the_build_context(side: str) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "deploy" / f"Dockerfile.{side}").read_text(), re.M)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists()
        folders = [name, *map(str, Path(name).parents)]
        assert any(fnmatch.fnmatch(folder, one) for one in sent for folder in folders), name


@pytest.mark.parametrize("side", ["cloud", "edge"])
def test_each_stage_copies_enough_for_pip(side: str, tmp_path: Path) -> None:
    """Each ``pip install .`` of the image reads the project from what the lines above it brought."""
    installs = 0
    for line in (ROOT / "deploy" / f"Dockerfile.{side}").read_text().replace("\\\n", " ").splitlines():
        if copied := re.fullmatch(r"COPY (?!--)(.+) (\S+)", line):
            names, target = copied[1].split(), tmp_path / copied[2]
            for name in names:
                into = target / name if len(names) > 1 or copied[2] == "./" else target
                into.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, into, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, into)
        for made in re.findall(r"mkdir ([^&]+)", line):
            for name in made.split():
                (tmp_path / name).mkdir()
        if "pip install" in line:
            installs += 1
            read = "import hatchling.build; print(hatchling.build.build_wheel('.'))"
            ran = subprocess.run([sys.executable, "-c", read], cwd=tmp_path, capture_output=True, text=True)
            assert ran.returncode == 0, f"{line}\n{ran.stderr}"
    assert installs == 2
