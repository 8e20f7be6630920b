"""An edge without PyTorch: heads as ONNX files (`edge_client.export`), their tails on a server.

Needs numpy, grpcio, protobuf, onnxruntime, and Pillow for pictures; torch is neither needed nor loaded. What crosses is
sent over the Open Inference Protocol to the model ``NAME@CUT`` of the server (docs/jobs/edge-without-pytorch.md).
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import statistics
import tempfile
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from edge_client import light_codecs
from edge_client.credentials import Credentials
from edge_client.dial import check_address, check_process, dial, hang_up
from protos.inference import inference_pb2
from shared_hooks import picture
from shared_hooks.errors import (
    Disagreement,
    InputMismatch,
    IsthmusError,
    ServerUnavailable,
    SpecError,
    UnknownLayer,
    by_name,
    near,
)
from shared_hooks.frames import Frame

Array = npt.NDArray[Any]
AUTO: Final = "auto"
EDGE: Final = "edge"
RAW: Final = "raw"
DATATYPES: Final = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
"""numpy's names of dtypes, and the protocol's."""
PROVIDERS: Final = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "directml": "DmlExecutionProvider",
    "qnn": "QNNExecutionProvider",
}
"""Short names of onnxruntime's execution providers, whose own names are accepted, too."""
VERSION: Final = 2
"""The version of a folder's manifest."""
EXAMPLE: Final = "example.npz"
"""The model's example (``input/0``, ...) and elements of what each file gives for it (``FILE/0``, at ``FILE/0.at``)."""
ELEMENTS: Final = 256
"""The elements of each tensor by which a device compares its onnxruntime with the one at the export."""
MOST_OFF: Final = 0.01
"""The largest difference there, as a share of the largest magnitude: rounding, TF32 and half precision are below it."""
MOST_SIZES: Final = 32
"""The maximum number of dimensions of an output."""
TRIES: Final = 3
"""The number of requests through each cut before ``split="auto"`` chooses."""
_GONE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True)
class LightPrediction:
    """One predicted class, with its label and score; ``row`` counts the inputs of a batch."""

    label: str
    index: int
    score: float
    row: int = 0


@dataclass(frozen=True)
class LightAnswer:
    """The answer to one request. ``outputs``: the model's, by name. Times in nanoseconds: of the head here, of the
    request for the tail, of both.

    The head did not run in torch: the answer is within what the manifest says of this cut (``difference``), not bit for
    bit.
    """

    outputs: Mapping[str, Array]
    split: str
    head_ns: int
    request_ns: int
    end_to_end_ns: int
    bytes_up: int
    difference: float
    fallback: str = ""
    """Why the whole model ran here; empty if the server answered."""
    predictions: tuple[LightPrediction, ...] = ()
    queue_ns: int = 0
    tail_ns: int = 0
    """Nanoseconds on the server, within ``request_ns``: until work began, and of the tail; 0 if it does not report
    them.
    """

    @property
    def bytes_down(self) -> int:
        """The bytes of the outputs."""
        return sum(one.nbytes for one in self.outputs.values())

    @property
    def result(self) -> Any:
        """`predictions` if the model's spec ranks class scores, else `outputs`."""
        return self.predictions or self.outputs

    @property
    def output(self) -> Array:
        """The only output. Raises InputMismatch if there are several."""
        if len(self.outputs) != 1:
            raise InputMismatch(f"the model has several outputs: {', '.join(self.outputs)}")
        return next(iter(self.outputs.values()))


@dataclass(frozen=True)
class NodeTime:
    """One node of a head's graph: its name, kind, the provider that ran it, the median of ``runs`` in nanoseconds."""

    name: str
    kind: str
    provider: str
    ns: int
    runs: int


@dataclass(frozen=True)
class Tensor:
    """A tensor's name, dtype (numpy's word) and shape, with -1 for a size that may be any."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def freed(self, axes: Sequence[int]) -> Tensor:
        """Return the same with any size along these axes."""
        return replace(self, shape=tuple(-1 if axis in axes else size for axis, size in enumerate(self.shape)))

    def check(self, array: Any, largest: Mapping[int, int] | None = None) -> Array:
        """Return the array itself, contiguous. ``largest``: limits of variable sizes, by axis. Raises InputMismatch."""
        most = largest or {}
        found = np.asarray(array, order="C")  # ascontiguousarray would give an array without dimensions one
        fits = len(found.shape) == len(self.shape) and all(
            wanted == size or (wanted == -1 and size <= most.get(axis, size))
            for axis, (size, wanted) in enumerate(zip(found.shape, self.shape, strict=True))
        )
        if found.dtype.name != self.dtype or not fits:
            bounds = [f"{most[axis]}" for axis, size in enumerate(self.shape) if size == -1 and axis in most]
            bound = f" (-1: up to {', '.join(bounds)})" if bounds else ""
            raise InputMismatch(
                f'"{self.name}": {found.dtype.name} of shape {list(found.shape)} came; expected {self.dtype} of shape '
                f"{list(self.shape)}{bound}"
            )
        return found


@dataclass(frozen=True)
class LightHead:
    """One cut: its file, the model's inputs, what crosses, and the largest difference of answers from the whole
    model's.
    """

    cut: str
    file: str
    inputs: tuple[Tensor, ...]
    crossing: tuple[Tensor, ...]
    difference: float
    largest: Mapping[int, int] = field(default_factory=dict)
    """The limits of variable sizes, by axis."""
    flat: frozenset[str] = frozenset()
    """The part of it that a codec may encode."""
    codecs: Mapping[str, float] = field(default_factory=dict)
    """The expected differences of answers with a lossy codec."""


def elements(array: Array) -> tuple[Array, Array]:
    """Return positions in the flattened array, evenly spaced, with that of the largest magnitude; and what is there."""
    flat = np.asarray(array).reshape(-1)
    at = np.linspace(0, max(flat.size - 1, 0), min(flat.size, ELEMENTS)).astype(np.int64)
    if flat.size:
        numbers = flat.astype(np.float64)
        at = np.unique(np.append(at, np.abs(np.where(np.isfinite(numbers), numbers, 0)).argmax()))
    return at, flat[at]


def difference_at(array: Array, at: Array, wanted: Array) -> float:
    """Return the largest difference from the `elements` of another array, as a share of their largest magnitude.

    Infinite for another size or dtype, for other non-finite values, and for other integers of 32 bits and more, which
    are indices; those of 8 and 16 are rounded numbers.
    """
    flat = np.asarray(array).reshape(-1)
    if flat.size != (at[-1] + 1 if at.size else 0) or flat.dtype != wanted.dtype:  # the last element is one of them
        return math.inf
    if wanted.dtype.kind in "iu" and wanted.itemsize > 2:
        return 0.0 if np.array_equal(flat[at], wanted) else math.inf
    found, wanted = flat[at].astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return math.inf
    most = float(np.abs(wanted[finite]).max(initial=0.0))
    return float(np.abs(found[finite] - wanted[finite]).max(initial=0.0)) / (most or 1.0)


class HeadFolder:
    """A folder of `edge_client.export`. Raises SpecError for another folder, or one with changed files."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        file = self.folder / "manifest.json"
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"{file} cannot be read: {error.strerror}; edge-client export writes it") from error
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{file} is not JSON: {error}") from error
        try:
            if known["format"] != "isthmus-heads" or known["version"] != VERSION:
                raise ValueError(f"format {known['format']!r}, version {known['version']!r}")
            self.model, self.weights = str(known["model"]), str(known["weights"])
            self.inputs = _tensors(known["inputs"])
            self.outputs = tuple(map(str, known["outputs"]))
            self.labels = tuple(map(str, known["labels"]))
            self.whole = None if known["whole"] is None else str(known["whole"])
            self.whole_difference = float(known["whole_difference"])
            pictures, self._ranks = known["preprocess"], known["postprocess"]
            self._pictures = None if pictures is None else _Pictures(**pictures)
            if self._ranks is not None:
                self._ranks = {name: self._ranks[name] for name in ("output", "softmax", "top_k")}
            self.heads = {
                str(one["cut"]): LightHead(
                    str(one["cut"]),
                    str(one["file"]),
                    tuple(tensor.freed([*map(int, one["free"].get(tensor.name, ()))]) for tensor in self.inputs),
                    _tensors(one["crossing"]),
                    float(one["difference"]),
                    {int(axis): int(most) for axis, most in one["largest"].items()},
                    frozenset(map(str, one["flat"])),
                    {str(name): float(known["bound"]) for name, known in one["codecs"].items()},
                )
                for one in known["heads"]
            }
            self.refused = {str(cut): str(why) for cut, why in known["refused"].items()}
            digests = {str(name): str(digest) for name, digest in known["sha256"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"{file} is no manifest of heads: {type(error).__name__}: {error}") from error
        files = {EXAMPLE, *(one.file for one in self.heads.values()), *([self.whole] if self.whole else [])}
        for name in files | digests.keys():
            self._check(name, digests.get(name, ""))
        try:
            with np.load(self.folder / EXAMPLE, allow_pickle=False) as example:
                self.example: dict[str, Array] = dict(example)
                """See `EXAMPLE`."""
        except (OSError, ValueError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise SpecError(f"{self.folder / EXAMPLE} cannot be read: {error}") from error

    @property
    def cuts(self) -> list[str]:
        """The cuts with a head, in the order of the manifest."""
        return list(self.heads)

    def head(self, cut: str) -> LightHead:
        """Return the head of a cut. Raises UnknownLayer, with the reason if its export was refused."""
        if cut in self.heads:
            return self.heads[cut]
        if cut in self.refused:
            raise UnknownLayer(f"{cut} was not exported: {self.refused[cut]}")
        raise UnknownLayer(
            f"no head of {cut!r} in {self.folder}; there is: {', '.join(self.cuts)}{near(cut, self.cuts)}"
        )

    def zeros(self, cut: str) -> tuple[Array, ...]:
        """Zeros of a head's input form, with 1 for variable sizes."""
        return tuple(np.zeros([max(size, 1) for size in one.shape], one.dtype) for one in self.head(cut).inputs)

    def read(self, path: str | Path) -> tuple[Array, ...]:
        """Return a picture or a .npy file as the model's inputs, as the spec's [preprocess] says. Raises
        InputMismatch.
        """
        file = Path(path)
        if file.suffix.lower() == ".npy":
            try:
                return (np.load(file, allow_pickle=False),)
            except (OSError, ValueError) as error:
                raise InputMismatch(f"{file} cannot be read: {error}") from error
        if self._pictures is None:
            raise InputMismatch(
                f"{file}: {self.model} has no preprocessing of pictures that is possible without its code"
            )
        return (_as_array(file, self._pictures),)

    def of_frame(self, frame: Frame) -> tuple[Array, ...]:
        """Return a frame of a camera or video (`edge_client.sources`) as the model's inputs."""
        from PIL import Image

        if self._pictures is None:
            raise InputMismatch(f"{frame.id.name}: {self.model} has no preprocessing of pictures")
        held = io.BytesIO()
        Image.fromarray(frame.pixels).save(held, "PNG", compress_level=0)
        return (_pixels(held.getvalue(), frame.id.name, self._pictures),)

    def rank(self, outputs: Mapping[str, Array]) -> tuple[LightPrediction, ...]:
        """Return the best classes, if the spec ranks class scores; else empty."""
        ranks, known = self._ranks, list(outputs)
        if ranks is None or not known:
            return ()
        wanted = ranks["output"] if isinstance(ranks["output"], str) else "logits"
        scores = outputs.get(wanted, outputs[known[0]])
        if scores.ndim not in (1, 2) or not scores.size or scores.dtype.kind not in "fiu":
            return ()
        rows = scores.reshape(-1, scores.shape[-1]).astype(np.float32)
        if ranks["softmax"]:
            rows = np.exp(rows - rows.max(axis=1, keepdims=True))
            rows /= rows.sum(axis=1, keepdims=True)
        return tuple(
            LightPrediction(self.labels[at] if at < len(self.labels) else str(at), int(at), float(row[at]), number)
            for number, row in enumerate(rows)
            for at in np.argsort(-row, kind="stable")[: int(ranks["top_k"])]
        )

    def _check(self, name: str, digest: str) -> None:
        if Path(name).name != name:
            raise SpecError(f"{self.folder}: the manifest names {name!r}, which is outside of the folder")
        try:
            with (self.folder / name).open("rb") as file:
                found = _sha(file)
        except OSError as error:
            raise SpecError(f"{self.folder / name} cannot be read: {error.strerror}") from error
        if found != digest:
            raise SpecError(f"{self.folder / name} is not the file that was exported: its digest is another")


class LightClient:
    """Runs a head here and its tail on ``server`` (HOST:PORT). Thread-safe; `close` it, or use ``with``.

        with LightClient("10.0.0.2:50051", "heads/", split="stage2.0.conv2") as client:
            print(client.infer(image).output)

    ``heads``: a folder of `edge_client.export`, or `HeadFolder`. ``split``: one of its cuts; "auto": the fastest of
    them, by `TRIES` requests through each; None: the only one. ``provider``: onnxruntime's, by a name of `PROVIDERS`;
    ``threads``: within one operation. ``deadline``: seconds for a request; ``patience``: seconds to wait for an
    unavailable server (none with a fallback). ``fallback="edge"``: run the whole model here if the server does not
    answer; the folder must contain it (``export(whole=True)``). ``codec``: one of `edge_client.light_codecs`, or
    "learned:FILE" of `edge_client.learn`, for what crosses; the manifest lists the effect of those that were measured.

    Before a head is first used, what it gives for the model's example is compared with what it gave at the export:
    another release of onnxruntime, another provider or processor may be wrong.

    Raises SpecError (also for a provider that this onnxruntime lacks, and a head that is wrong here) and UnknownLayer.
    """

    def __init__(
        self,
        server: str,
        heads: str | Path | HeadFolder,
        split: str | None = None,
        *,
        provider: str = "cpu",
        threads: int | None = None,
        credentials: Credentials | None = None,
        deadline: float = 60.0,
        patience: float = 15.0,
        fallback: str | None = None,
        codec: str = RAW,
    ) -> None:
        self.heads = heads if isinstance(heads, HeadFolder) else HeadFolder(heads)
        self._learned: light_codecs.LearnedCodecFile | None = None
        if codec.startswith(light_codecs.LEARNED):
            self._learned = light_codecs.LearnedCodecFile(codec.removeprefix(light_codecs.LEARNED))
            if self._learned.weights != self.heads.weights:
                raise SpecError(f"{codec} was learnt with other weights than those of {self.heads.folder}")
            codec = self._learned.name
        elif codec != RAW:
            light_codecs.encode(codec, np.zeros(1, np.float32))
        self._codec = codec
        self.server = check_address(server)
        if split is None and len(self.heads.heads) != 1:
            raise SpecError(f"split: there are several heads: {', '.join(self.heads.cuts)}")
        if fallback not in (None, EDGE):
            raise SpecError(f'fallback={fallback!r}: expected None or "{EDGE}"')
        if fallback == EDGE and self.heads.whole is None:
            raise SpecError(f"fallback: the whole model is not in {self.heads.folder}: export it with whole=True")
        self.split = self.heads.cuts[0] if split is None else split
        if self._learned is not None and self.split not in (AUTO, self._learned.cut):
            raise SpecError(f"{codec} is for the cut after {self._learned.cut}, not {self.split}")
        self._fallback, self._deadline = fallback, deadline
        self._patience = 0.0 if fallback == EDGE else patience
        self.provider, self._threads = provider_of(provider), threads
        self._sessions: dict[str, Any] = {}
        self.listeners: list[Callable[[LightAnswer | IsthmusError], None]] = []
        """Called with every answer and failure, in the requesting thread."""
        if self.split != AUTO:
            self._session(self.heads.head(self.split).file)
        self._channel = dial(self.server, credentials=credentials)
        self._infer = self._method("ModelInfer", inference_pb2.ModelInferRequest, inference_pb2.ModelInferResponse)
        self._live = self._method("ServerLive", inference_pb2.ServerLiveRequest, inference_pb2.ServerLiveResponse)

    def _method(self, name: str, request: Any, response: Any) -> Any:
        """Return a call of the protocol's service, whose package differs from that of this project's file, as Triton's
        client has it.
        """
        return self._channel.unary_unary(
            f"/inference.GRPCInferenceService/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )

    def __enter__(self) -> LightClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; requests in progress fail. Idempotent."""
        hang_up(self._channel)

    def infer(
        self, *args: Array, split: str | None = None, deadline: float | None = None, **kwargs: Array
    ) -> LightAnswer:
        """Make one request. Arrays in the order of the model's inputs, or by name. ``deadline``: in seconds.

        Raises InputMismatch, ServerUnavailable without an answer in time, Disagreement for a server with other weights,
        and the server's other refusals.
        """
        try:
            answer = self._answered(args, kwargs, split or self.split, deadline or self._deadline)
        except IsthmusError as error:
            self._notify(error)
            raise
        self._notify(answer)
        return answer

    def _notify(self, what: LightAnswer | IsthmusError) -> None:
        for listener in tuple(self.listeners):
            listener(what)

    def _answered(self, args: Sequence[Array], kwargs: Mapping[str, Array], cut: str, deadline: float) -> LightAnswer:
        check_process()
        began = time.perf_counter_ns()
        feeds = self._feeds(args, kwargs)
        done, difference, nbytes, why = began, self.heads.whole_difference, 0, ""
        there = (0, 0)
        try:
            if cut == AUTO:
                cut = self.split = self._fastest(feeds)
            head = self.heads.head(cut)
            crossing = self._head(head, feeds)
            done = time.perf_counter_ns()
            request, crossed = self._request(head, crossing, feeds)
            outputs, there = self._outputs_of(request, deadline)
            difference, nbytes = head.codecs.get(self._codec, head.difference), crossed
        except ServerUnavailable as error:
            if self._fallback != EDGE or self.heads.whole is None:
                raise
            outputs, why = self._run(self.heads.whole, self.heads.inputs, feeds, None), f"{error}"
        ended = time.perf_counter_ns()
        return LightAnswer(
            outputs,
            cut,
            head_ns=done - began,
            request_ns=ended - done,
            end_to_end_ns=ended - began,
            bytes_up=nbytes,
            difference=difference,
            fallback=why,
            predictions=self.heads.rank(outputs),
            queue_ns=there[0],
            tail_ns=there[1],
        )

    def crossing(self, *args: Array, split: str | None = None, **kwargs: Array) -> dict[str, Array]:
        """Return the head's results by name, without the server. Raises as `infer` does."""
        return self._head(self.heads.head(split or self.split), self._feeds(args, kwargs))

    def ping(self, deadline: float = 1.5) -> int:
        """Return nanoseconds of a round trip to the server. Raises ServerUnavailable after ``deadline`` seconds."""
        began = time.perf_counter_ns()
        try:
            self._live(inference_pb2.ServerLiveRequest(), timeout=deadline)
        except grpc.RpcError as error:
            raise _error(error, self.server) from error
        return time.perf_counter_ns() - began

    def infer_file(self, path: str | Path) -> LightAnswer:
        """Return the same for a picture or a .npy file."""
        return self.infer(*self.heads.read(path))

    def infer_many(
        self, inputs: Iterable[Any], *, in_flight: int = 1, prepare: Callable[[Any], Sequence[Array]] | None = None
    ) -> Iterator[LightAnswer | IsthmusError]:
        """Answers in the order of ``inputs``, with up to ``in_flight`` in progress; an input that fails gives its
        error.

        An input is an array, a tuple of them, or what ``prepare`` makes arrays of; paths are read as files, and frames
        of `edge_client.sources` as pictures.
        """

        def one(item: Any) -> LightAnswer | IsthmusError:
            try:
                if prepare is not None:
                    return self.infer(*prepare(item))
                if isinstance(item, (str, Path)):
                    return self.infer_file(item)
                if isinstance(item, Frame):
                    return self.infer(*self.heads.of_frame(item))
                return self.infer(*(item if isinstance(item, tuple) else (item,)))
            except IsthmusError as error:
                return error

        waiting: deque[Future[LightAnswer | IsthmusError]] = deque()
        with ThreadPoolExecutor(in_flight, thread_name_prefix="isthmus-light") as pool:
            for item in inputs:
                waiting.append(pool.submit(one, item))
                if len(waiting) == in_flight:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def node_times(self, *args: Array, split: str | None = None, runs: int = 5) -> list[NodeTime]:
        """Return the time of each node of a head, by onnxruntime's own profiler, in order, without the first run.

        Fused nodes are one. Raises as `infer` does; does not use the server.
        """
        import onnxruntime

        cut = split or self.split
        head = self.heads.head(self.heads.cuts[0] if cut == AUTO else cut)
        feeds = {one.name: one.check(self._feeds(args, {})[one.name]) for one in head.inputs}
        with tempfile.TemporaryDirectory(prefix="isthmus-nodes-") as folder:
            options = self._options()
            options.enable_profiling, options.profile_file_prefix = True, f"{folder}/nodes"
            where = str(self.heads.folder / head.file)
            session = onnxruntime.InferenceSession(where, options, providers=[self.provider])
            taken = {one.name: feeds[one.name] for one in session.get_inputs()}
            for _ in range(runs + 1):
                session.run(None, taken)
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        took: dict[str, list[int]] = {}
        kinds: dict[str, tuple[str, str]] = {}
        for one in events:
            name = str(one.get("name", ""))
            if one.get("cat") == "Node" and name.endswith("_kernel_time"):
                name = name.removesuffix("_kernel_time")
                took.setdefault(name, []).append(1000 * int(one["dur"]))
                kinds[name] = str(one["args"].get("op_name", "")), str(one["args"].get("provider", ""))
        return [
            NodeTime(name, *kinds[name], round(statistics.median(each[1:] or each)), len(each[1:] or each))
            for name, each in took.items()
        ]

    def _feeds(self, args: Sequence[Array], kwargs: Mapping[str, Array]) -> dict[str, Array]:
        names = [one.name for one in self.heads.inputs]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        if len(args) > len(names) or given.keys() != set(names) or set(names[: len(args)]) & kwargs.keys():
            raise InputMismatch(f"the model takes {', '.join(names)}; {len(args)} arrays and {sorted(kwargs)} came")
        return given

    def _session(self, file: str) -> Any:
        if file not in self._sessions:
            import onnxruntime

            try:
                where = str(self.heads.folder / file)
                session = onnxruntime.InferenceSession(where, self._options(), providers=[self.provider])
            except Exception as error:  # onnxruntime has no single class for what a file may contain
                raise SpecError(f"{self.heads.folder / file} cannot be loaded: {str(error).splitlines()[0]}") from error
            self._check_example(file, session)
            self._sessions[file] = session
        return self._sessions[file]

    def _check_example(self, file: str, session: Any) -> None:
        """Raise SpecError if a file gives something else for the example than where it was exported."""
        import onnxruntime

        example = self.heads.example
        if f"{file}/0" not in example:  # the model rejects its example
            return
        where = f"{self.heads.folder / file}, in onnxruntime {onnxruntime.__version__} by {self.provider}"
        try:
            inputs = {one.name: example[f"input/{number}"] for number, one in enumerate(self.heads.inputs)}
            found = session.run(None, {one.name: inputs[one.name] for one in session.get_inputs()})
            off = [
                difference_at(array, example[f"{file}/{number}.at"], example[f"{file}/{number}"])
                for number, array in enumerate(found)
            ]
        except Exception as error:  # onnxruntime has no single class for its failures
            raise SpecError(f"{where}, fails on the model's example: {str(error).splitlines()[0]}") from error
        if max(off) > MOST_OFF:
            raise SpecError(
                f"{where}, is wrong: for the model's example it differs by {max(off):.1e} of the largest element from "
                "what it gave at the export (use another release or provider)"
            )

    def _options(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # failures are raised
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        return options

    def _head(self, head: LightHead, feeds: Mapping[str, Array]) -> dict[str, Array]:
        for one in head.inputs:
            one.check(feeds[one.name], head.largest)
        return self._run(head.file, head.inputs, feeds, [one.name for one in head.crossing])

    def _run(
        self, file: str, inputs: Sequence[Tensor], feeds: Mapping[str, Array], names: list[str] | None
    ) -> dict[str, Array]:
        checked = {one.name: one.check(feeds[one.name]) for one in inputs}
        session = self._session(file)
        names = [one.name for one in session.get_outputs()] if names is None else names
        try:
            found = session.run(names, {one.name: checked[one.name] for one in session.get_inputs()})
        except Exception as error:  # onnxruntime's own classes; the file is as exported, and so is the input's form
            raise InputMismatch(f"{file} fails on this input: {str(error).splitlines()[0]}") from error
        return dict(zip(names, found, strict=True))

    def _fastest(self, feeds: Mapping[str, Array]) -> str:
        """Return the cut with the least median of `TRIES` requests, without the first of each."""
        medians: dict[str, float] = {}
        for cut, head in self.heads.heads.items():
            took = []
            for _ in range(TRIES + 1):
                began = time.perf_counter()
                crossing = self._head(head, feeds)
                self._outputs_of(self._request(head, crossing, feeds)[0], self._deadline)
                took.append(time.perf_counter() - began)
            medians[cut] = statistics.median(took[1:])
        return min(medians, key=medians.__getitem__)

    def _request(
        self, head: LightHead, crossing: Mapping[str, Array], feeds: Mapping[str, Array] | None = None
    ) -> tuple[Any, int]:
        """Return the request for the tail, and the bytes of what crosses. ``feeds``: the head's inputs."""
        request = inference_pb2.ModelInferRequest(model_name=f"{self.heads.model}@{head.cut}")
        request.parameters["isthmus_weights"].string_param = self.heads.weights
        if feeds is not None:
            shapes = {one.name: np.shape(feeds[one.name]) for one in self.heads.inputs}
            request.parameters["isthmus_shapes"].string_param = json.dumps(shapes)
        codecs: dict[str, Any] = {}
        if self._codec in light_codecs.ROUNDING and self._codec not in head.codecs:
            raise SpecError(f"codec={self._codec!r}: it makes other answers at {head.cut}, as was seen at the export")
        for number, one in enumerate(head.crossing):
            array = one.check(crossing[one.name])
            request.inputs.add(name=one.name, datatype=DATATYPES[one.dtype], shape=array.shape)
            coded = self._coded(head, number, array) if self._codec != RAW and one.name in head.flat else None
            if coded is not None:
                codecs[one.name] = [self._codec, coded[1]]
            request.raw_input_contents.append(array.tobytes() if coded is None else coded[0])
        if codecs:
            request.parameters["isthmus_codecs"].string_param = json.dumps(codecs)
        return request, sum(map(len, request.raw_input_contents))

    def _coded(self, head: LightHead, number: int, array: Array) -> tuple[bytes, list[int]] | None:
        """Return the ``number``-th tensor that crosses, encoded; None: it is sent unchanged."""
        if self._learned is None:
            return light_codecs.encode(self._codec, array)
        return self._learned.encode(number, array) if head.cut == self._learned.cut else None

    def _outputs_of(self, request: Any, deadline: float) -> tuple[dict[str, Array], tuple[int, int]]:
        """Return the outputs, and the server's queue and tail in nanoseconds."""
        reply = self._sent(request, deadline)
        kinds = {"BF16": "uint16", **{datatype: name for name, datatype in DATATYPES.items()}}
        outputs = {}
        for number, output in enumerate(reply.outputs):
            if output.datatype not in kinds or number >= len(reply.raw_output_contents):
                raise Disagreement(
                    f'the server gives "{output.name}" as {output.datatype}, which is not understood here'
                )
            data, shape = reply.raw_output_contents[number], tuple(output.shape)
            kind = np.dtype(kinds[output.datatype])
            wanted = math.prod(shape) * kind.itemsize
            if len(shape) > MOST_SIZES or any(size < 0 for size in shape) or wanted != len(data):
                raise Disagreement(f'the server gives {len(data)} bytes of "{output.name}" of shape {list(shape)[:8]}')
            found = np.frombuffer(data, dtype=kind).reshape(shape)
            outputs[output.name] = _single(found) if output.datatype == "BF16" else found
        took = [max(0, reply.parameters[name].int64_param) for name in ("isthmus_queue_ns", "isthmus_tail_ns")]
        return outputs, (took[0], took[1])

    def _sent(self, request: Any, deadline: float) -> Any:
        """Send a request, which has no side effects, and retry until ``patience`` is over if no server answers."""
        until, pause = time.monotonic() + self._patience, 0.1
        while True:
            try:
                return self._infer(request, timeout=deadline)
            except grpc.RpcError as error:
                found = _error(error, self.server)
                if not isinstance(found, ServerUnavailable) or time.monotonic() + pause > until:
                    raise found from error
            time.sleep(pause)
            pause = min(2 * pause, 2.0)


def _single(bits: Array) -> Array:
    """bfloat16, which numpy does not have, as float32, whose upper half it is."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class _Pictures:
    """The spec's [preprocess], equal to `shared_hooks.models.images.ImagePreprocess`."""

    size: Sequence[int] | None
    shorter_side: int | None
    mode: str
    interpolation: str
    scale: float
    mean: Sequence[float]
    std: Sequence[float]
    layout: str
    dtype: str
    keyword: str | None = field(default=None)


def _as_array(file: Path, how: _Pictures) -> Array:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputMismatch(f"{file} cannot be read: {error.strerror}") from error
    return _pixels(data, str(file), how)


def _pixels(data: bytes, name: str, how: _Pictures) -> Array:
    size = None if how.size is None else (int(how.size[0]), int(how.size[1]))
    requested: picture.How = {
        "mode": how.mode,
        "size": size,
        "shorter_side": how.shorter_side,
        "interpolation": how.interpolation,
        "max_pixels": picture.MAX_OWN_PIXELS,
    }
    try:
        _, (width, height), pixels = picture.decode(data, requested)
    except picture.PictureRefused as error:
        raise InputMismatch(f"{name} cannot be read as an image: {error}") from None
    values: Array = np.frombuffer(pixels, dtype=np.uint8).reshape(height, width, -1).astype(np.float32)
    values = values * np.float32(how.scale / 255.0)
    values = (values - np.asarray(how.mean, np.float32)) / np.asarray(how.std, np.float32)
    if how.layout == "NCHW":
        values = values.transpose(2, 0, 1)
    return np.ascontiguousarray(values.astype(how.dtype))[None]


def provider_of(name: str) -> str:
    """onnxruntime's name of an execution provider. Raises SpecError for one that is not available."""
    import onnxruntime

    there = onnxruntime.get_available_providers()
    wanted = PROVIDERS.get(name.lower(), name)
    if wanted not in there:
        short = {long: word for word, long in PROVIDERS.items()}
        raise SpecError(
            f"provider {name!r} is not in this onnxruntime {onnxruntime.__version__}; there is: "
            f"{', '.join(short.get(one, one) for one in there)}"
        )
    return wanted


def _tensors(entries: Any) -> tuple[Tensor, ...]:
    found = tuple(Tensor(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in entries)
    for one in found:
        if one.dtype not in DATATYPES:
            raise ValueError(f"{one.name}: dtype {one.dtype}")
    return found


def _sha(file: Any) -> str:
    digest = hashlib.sha256()
    while data := file.read(1 << 20):
        digest.update(data)
    return digest.hexdigest()


def _error(error: grpc.RpcError, server: str) -> IsthmusError:
    """Return the server's error by its name; ServerUnavailable without an answer."""
    call: Any = error
    details, code = str(call.details() or ""), call.code()
    kind, colon, text = details.partition(": ")
    if colon and kind.isidentifier() and kind[:1].isupper():
        return by_name(kind)(text)
    if code in _GONE:
        return ServerUnavailable(f"{server}: {code.name}: {details}")
    return Disagreement(f"{server} does not answer as a cloud-server: {code.name}: {details}")
