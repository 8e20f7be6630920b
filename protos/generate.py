"""Makes the Python code of the wire from its .proto files, or checks that the committed code is what they say.

    python -m protos.generate            # writes *_pb2.py, *_pb2.pyi, *_pb2_grpc.py and *_pb2_grpc.pyi in place
    python -m protos.generate --check    # writes nothing; exit status 1 and the names of the files that differ

The compiler is grpcio-tools 1.76, the oldest supported one: newer runtimes accept its code, older runtimes refuse newer
code. The compiler has no stub for the service classes, so this module writes that one from the service's descriptor.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
COMPILER = "1.76"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m protos.generate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check: bool = parser.parse_args(argv).check
    found = importlib.metadata.version("grpcio-tools")
    if not found.startswith(f"{COMPILER}."):
        print(f"generate: grpcio-tools {COMPILER} is needed, {found} is installed", file=sys.stderr)
        return 2
    if not check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        made = generate(Path(folder))
        different = [name for name in made if not _same(ROOT / name, Path(folder) / name)]
    for name in different:
        print(f"generate: {name} is not what {_proto_of(name)} yields; run python -m protos.generate", file=sys.stderr)
    return 1 if different else 0


def generate(target: Path) -> list[str]:
    """Writes the code of every .proto below ``protos/`` under ``target``; returns the names, relative to it."""
    from grpc_tools import protoc  # a development tool: not installed where the wire is only used

    made: list[str] = []
    for proto in sorted((ROOT / "protos").rglob("*.proto")):
        name = proto.relative_to(ROOT).as_posix()
        with tempfile.TemporaryDirectory() as folder:
            described = Path(folder) / "set"
            outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
            if protoc.main(["protoc", f"-I{ROOT}", *outputs, f"--descriptor_set_out={described}", name]) != 0:
                raise SystemExit(f"generate: {name} does not compile")
            (file,) = descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes()).file
        stem = name.removesuffix(".proto")
        (target / f"{stem}_pb2_grpc.pyi").write_text(_service_stub(file), encoding="utf-8")
        made += [f"{stem}_pb2{ending}" for ending in (".py", ".pyi", "_grpc.py", "_grpc.pyi")]
    return made


def _service_stub(file: descriptor_pb2.FileDescriptorProto) -> str:
    """Types of the service's stub, servicer and registration, as the gRPC plugin writes their code."""
    module = Path(file.name).stem + "_pb2"
    package = ".".join(Path(file.name).parent.parts)
    lines = [
        "from collections.abc import Iterator",
        "",
        "import grpc",
        "",
        f"from {package} import {module}",
    ]
    for service in file.service:
        stub, servicer = (
            [f"class {service.name}Stub:", "    def __init__(self, channel: grpc.Channel) -> None: ..."],
            [f"class {service.name}Servicer:"],
        )
        for method in service.method:
            request, reply = (f"{module}.{full.rsplit('.', 1)[1]}" for full in (method.input_type, method.output_type))
            kind = f"{_arity(method.client_streaming)}{_arity(method.server_streaming)}MultiCallable"
            stub.append(f"    {method.name}: grpc.{kind}[{request}, {reply}]")
            takes = f"request_iterator: Iterator[{request}]" if method.client_streaming else f"request: {request}"
            gives = f"Iterator[{reply}]" if method.server_streaming else reply
            servicer.append(f"    def {method.name}(self, {takes}, context: grpc.ServicerContext) -> {gives}: ...")
        takes = f"servicer: {service.name}Servicer, server: grpc.Server"
        add = f"def add_{service.name}Servicer_to_server({takes}) -> None: ..."
        lines += ["", *stub, "", *servicer, "", add]
    return "\n".join(lines) + "\n"


def _arity(stream: bool) -> str:
    return "Stream" if stream else "Unary"


def _same(committed: Path, made: Path) -> bool:
    return committed.is_file() and committed.read_bytes() == made.read_bytes()


def _proto_of(name: str) -> str:
    return name.split("_pb2")[0] + ".proto"


if __name__ == "__main__":
    sys.exit(main())
