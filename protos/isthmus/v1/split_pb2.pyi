from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientFrame(_message.Message):
    __slots__ = ("hello", "cut", "request", "chunk", "acknowledge", "cancel", "closing", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    cut: CutUpload
    request: RequestHeader
    chunk: Chunk
    acknowledge: Acknowledge
    cancel: Cancel
    closing: Closing
    ping: Ping
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., cut: _Optional[_Union[CutUpload, _Mapping]] = ..., request: _Optional[_Union[RequestHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("welcome", "reply", "chunk", "failed", "draining", "heartbeat", "pong")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    reply: ReplyHeader
    chunk: Chunk
    failed: RequestFailed
    draining: Draining
    heartbeat: Heartbeat
    pong: Pong
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., reply: _Optional[_Union[ReplyHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., failed: _Optional[_Union[RequestFailed, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "client_id", "model_id", "weights_hash", "structure_digest", "plan_digest", "environment", "about", "inline_bytes", "heartbeat_ms", "manifest", "message_bytes", "area")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class AboutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    AREA_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client_id: str
    model_id: str
    weights_hash: str
    structure_digest: str
    plan_digest: str
    environment: _containers.ScalarMap[str, str]
    about: _containers.ScalarMap[str, str]
    inline_bytes: int
    heartbeat_ms: int
    manifest: bytes
    message_bytes: int
    area: Area
    def __init__(self, protocol_version: _Optional[int] = ..., client_id: _Optional[str] = ..., model_id: _Optional[str] = ..., weights_hash: _Optional[str] = ..., structure_digest: _Optional[str] = ..., plan_digest: _Optional[str] = ..., environment: _Optional[_Mapping[str, str]] = ..., about: _Optional[_Mapping[str, str]] = ..., inline_bytes: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., manifest: _Optional[bytes] = ..., message_bytes: _Optional[int] = ..., area: _Optional[_Union[Area, _Mapping]] = ...) -> None: ...

class Area(_message.Message):
    __slots__ = ("pid", "fd", "nbytes", "nonce")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    nbytes: int
    nonce: bytes
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., nbytes: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "max_request_bytes", "max_in_flight", "chunk_bytes", "about", "heartbeat_ms", "cuts", "notes", "rounding", "inline_bytes", "codecs", "message_bytes", "area", "open")
    class AboutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    ROUNDING_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    AREA_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    max_request_bytes: int
    max_in_flight: int
    chunk_bytes: int
    about: _containers.ScalarMap[str, str]
    heartbeat_ms: int
    cuts: Cuts
    notes: _containers.RepeatedScalarFieldContainer[str]
    rounding: _containers.RepeatedScalarFieldContainer[str]
    inline_bytes: int
    codecs: _containers.RepeatedScalarFieldContainer[str]
    message_bytes: int
    area: bool
    open: bool
    def __init__(self, protocol_version: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., max_in_flight: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., about: _Optional[_Mapping[str, str]] = ..., heartbeat_ms: _Optional[int] = ..., cuts: _Optional[_Union[Cuts, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ..., rounding: _Optional[_Iterable[str]] = ..., inline_bytes: _Optional[int] = ..., codecs: _Optional[_Iterable[str]] = ..., message_bytes: _Optional[int] = ..., area: bool = ..., open: bool = ...) -> None: ...

class Cuts(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class CutUpload(_message.Message):
    __slots__ = ("digest", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: str
    data: bytes
    def __init__(self, digest: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class RequestHeader(_message.Message):
    __slots__ = ("id", "cut_digest", "header", "payload_bytes", "session_id", "step", "deadline_ms", "want_metrics", "file", "hooks", "traceparent", "decoding", "payload", "together", "acknowledge", "area_offset", "sent_ns", "open", "route", "known_tables")
    ID_FIELD_NUMBER: _ClassVar[int]
    CUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    WANT_METRICS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    HOOKS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    AREA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TABLES_FIELD_NUMBER: _ClassVar[int]
    id: int
    cut_digest: str
    header: bytes
    payload_bytes: int
    session_id: int
    step: int
    deadline_ms: int
    want_metrics: bool
    file: FileInput
    hooks: _containers.RepeatedScalarFieldContainer[str]
    traceparent: str
    decoding: Decoding
    payload: bytes
    together: bool
    acknowledge: _containers.RepeatedScalarFieldContainer[int]
    area_offset: int
    sent_ns: int
    open: bool
    route: _containers.RepeatedCompositeFieldContainer[Hop]
    known_tables: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., cut_digest: _Optional[str] = ..., header: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., session_id: _Optional[int] = ..., step: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., want_metrics: bool = ..., file: _Optional[_Union[FileInput, _Mapping]] = ..., hooks: _Optional[_Iterable[str]] = ..., traceparent: _Optional[str] = ..., decoding: _Optional[_Union[Decoding, _Mapping]] = ..., payload: _Optional[bytes] = ..., together: bool = ..., acknowledge: _Optional[_Iterable[int]] = ..., area_offset: _Optional[int] = ..., sent_ns: _Optional[int] = ..., open: bool = ..., route: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., known_tables: _Optional[_Iterable[int]] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("server", "cut", "codec")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    server: str
    cut: str
    codec: str
    def __init__(self, server: _Optional[str] = ..., cut: _Optional[str] = ..., codec: _Optional[str] = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("id", "header", "payload_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    header: bytes
    payload_bytes: int
    def __init__(self, id: _Optional[int] = ..., header: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class Decoding(_message.Message):
    __slots__ = ("cut", "fork_of", "fork_step", "close", "together", "branch")
    CUT_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    FORK_STEP_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    cut: str
    fork_of: int
    fork_step: int
    close: bool
    together: int
    branch: int
    def __init__(self, cut: _Optional[str] = ..., fork_of: _Optional[int] = ..., fork_step: _Optional[int] = ..., close: bool = ..., together: _Optional[int] = ..., branch: _Optional[int] = ...) -> None: ...

class FileInput(_message.Message):
    __slots__ = ("suffix", "preprocess_digest")
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    PREPROCESS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    suffix: str
    preprocess_digest: str
    def __init__(self, suffix: _Optional[str] = ..., preprocess_digest: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("id", "offset", "data")
    ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    id: int
    offset: int
    data: bytes
    def __init__(self, id: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Durations(_message.Message):
    __slots__ = ("queue_ns", "decode_ns", "inject_ns", "compute_ns", "encode_ns", "receive_ns", "complete_ns", "onward_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    INJECT_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_NS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_NS_FIELD_NUMBER: _ClassVar[int]
    ONWARD_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    decode_ns: int
    inject_ns: int
    compute_ns: int
    encode_ns: int
    receive_ns: int
    complete_ns: int
    onward_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., inject_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., encode_ns: _Optional[int] = ..., receive_ns: _Optional[int] = ..., complete_ns: _Optional[int] = ..., onward_ns: _Optional[int] = ...) -> None: ...

class LayerColumns(_message.Message):
    __slots__ = ("table", "described", "inference_ns", "cpu_ns", "energy", "mean_power", "memory_allocated", "memory_peak", "cpu_utilisation", "gpu_utilisation", "memory_utilisation")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    DESCRIBED_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_NS_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_FIELD_NUMBER: _ClassVar[int]
    MEAN_POWER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ALLOCATED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_FIELD_NUMBER: _ClassVar[int]
    CPU_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    GPU_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    table: int
    described: bytes
    inference_ns: _containers.RepeatedScalarFieldContainer[int]
    cpu_ns: _containers.RepeatedScalarFieldContainer[int]
    energy: _containers.RepeatedScalarFieldContainer[int]
    mean_power: _containers.RepeatedScalarFieldContainer[int]
    memory_allocated: _containers.RepeatedScalarFieldContainer[int]
    memory_peak: _containers.RepeatedScalarFieldContainer[int]
    cpu_utilisation: _containers.RepeatedScalarFieldContainer[int]
    gpu_utilisation: _containers.RepeatedScalarFieldContainer[int]
    memory_utilisation: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[int] = ..., described: _Optional[bytes] = ..., inference_ns: _Optional[_Iterable[int]] = ..., cpu_ns: _Optional[_Iterable[int]] = ..., energy: _Optional[_Iterable[int]] = ..., mean_power: _Optional[_Iterable[int]] = ..., memory_allocated: _Optional[_Iterable[int]] = ..., memory_peak: _Optional[_Iterable[int]] = ..., cpu_utilisation: _Optional[_Iterable[int]] = ..., gpu_utilisation: _Optional[_Iterable[int]] = ..., memory_utilisation: _Optional[_Iterable[int]] = ...) -> None: ...

class LayerTable(_message.Message):
    __slots__ = ("layer_id", "name", "layer_type", "outputs")
    LAYER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYER_TYPE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    layer_id: _containers.RepeatedScalarFieldContainer[int]
    name: _containers.RepeatedScalarFieldContainer[str]
    layer_type: _containers.RepeatedScalarFieldContainer[str]
    outputs: _containers.RepeatedCompositeFieldContainer[LayerOutputs]
    def __init__(self, layer_id: _Optional[_Iterable[int]] = ..., name: _Optional[_Iterable[str]] = ..., layer_type: _Optional[_Iterable[str]] = ..., outputs: _Optional[_Iterable[_Union[LayerOutputs, _Mapping]]] = ...) -> None: ...

class LayerOutputs(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorShape]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorShape, _Mapping]]] = ...) -> None: ...

class TensorShape(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("value", "status", "note")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[Reading.Status]
        MEASURED: _ClassVar[Reading.Status]
        ESTIMATED: _ClassVar[Reading.Status]
        UNAVAILABLE: _ClassVar[Reading.Status]
    STATUS_UNSPECIFIED: Reading.Status
    MEASURED: Reading.Status
    ESTIMATED: Reading.Status
    UNAVAILABLE: Reading.Status
    VALUE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    value: float
    status: Reading.Status
    note: int
    def __init__(self, value: _Optional[float] = ..., status: _Optional[_Union[Reading.Status, str]] = ..., note: _Optional[int] = ...) -> None: ...

class ForwardMetric(_message.Message):
    __slots__ = ("total_ns", "layers_ns", "cpu_ns", "energy", "mean_power", "memory_peak")
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_NS_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_FIELD_NUMBER: _ClassVar[int]
    MEAN_POWER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_FIELD_NUMBER: _ClassVar[int]
    total_ns: int
    layers_ns: int
    cpu_ns: int
    energy: int
    mean_power: int
    memory_peak: int
    def __init__(self, total_ns: _Optional[int] = ..., layers_ns: _Optional[int] = ..., cpu_ns: _Optional[int] = ..., energy: _Optional[int] = ..., mean_power: _Optional[int] = ..., memory_peak: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("pending", "workers", "queue_ns")
    PENDING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    pending: int
    workers: int
    queue_ns: int
    def __init__(self, pending: _Optional[int] = ..., workers: _Optional[int] = ..., queue_ns: _Optional[int] = ...) -> None: ...

class ReplyHeader(_message.Message):
    __slots__ = ("id", "header", "payload_bytes", "durations", "layers", "forward", "notes", "load", "readings", "observations", "transforms", "payload", "batch_size", "compiled", "parts")
    ID_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    READINGS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSFORMS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    header: bytes
    payload_bytes: int
    durations: Durations
    layers: LayerColumns
    forward: ForwardMetric
    notes: _containers.RepeatedScalarFieldContainer[str]
    load: Load
    readings: _containers.RepeatedCompositeFieldContainer[Reading]
    observations: bytes
    transforms: _containers.RepeatedScalarFieldContainer[str]
    payload: bytes
    batch_size: int
    compiled: bool
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, id: _Optional[int] = ..., header: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., durations: _Optional[_Union[Durations, _Mapping]] = ..., layers: _Optional[_Union[LayerColumns, _Mapping]] = ..., forward: _Optional[_Union[ForwardMetric, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., readings: _Optional[_Iterable[_Union[Reading, _Mapping]]] = ..., observations: _Optional[bytes] = ..., transforms: _Optional[_Iterable[str]] = ..., payload: _Optional[bytes] = ..., batch_size: _Optional[int] = ..., compiled: bool = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("server", "cut", "bytes_up", "durations", "layers", "forward", "notes", "load", "readings", "observations", "transforms", "sends")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    READINGS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSFORMS_FIELD_NUMBER: _ClassVar[int]
    SENDS_FIELD_NUMBER: _ClassVar[int]
    server: str
    cut: str
    bytes_up: int
    durations: Durations
    layers: LayerColumns
    forward: ForwardMetric
    notes: _containers.RepeatedScalarFieldContainer[str]
    load: Load
    readings: _containers.RepeatedCompositeFieldContainer[Reading]
    observations: bytes
    transforms: _containers.RepeatedScalarFieldContainer[str]
    sends: int
    def __init__(self, server: _Optional[str] = ..., cut: _Optional[str] = ..., bytes_up: _Optional[int] = ..., durations: _Optional[_Union[Durations, _Mapping]] = ..., layers: _Optional[_Union[LayerColumns, _Mapping]] = ..., forward: _Optional[_Union[ForwardMetric, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., readings: _Optional[_Iterable[_Union[Reading, _Mapping]]] = ..., observations: _Optional[bytes] = ..., transforms: _Optional[_Iterable[str]] = ..., sends: _Optional[int] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("id", "code", "error", "message", "retry", "retry_after_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    id: int
    code: int
    error: str
    message: str
    retry: bool
    retry_after_ms: int
    def __init__(self, id: _Optional[int] = ..., code: _Optional[int] = ..., error: _Optional[str] = ..., message: _Optional[str] = ..., retry: bool = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("number", "clock_ns")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    number: int
    clock_ns: int
    def __init__(self, number: _Optional[int] = ..., clock_ns: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsReply(_message.Message):
    __slots__ = ("models", "unix_seconds")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    unix_seconds: int
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ..., unix_seconds: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_id", "weights_hash", "structure_digest", "plan_digest", "layers", "preprocess_digest", "machine")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PREPROCESS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    weights_hash: str
    structure_digest: str
    plan_digest: str
    layers: int
    preprocess_digest: str
    machine: str
    def __init__(self, model_id: _Optional[str] = ..., weights_hash: _Optional[str] = ..., structure_digest: _Optional[str] = ..., plan_digest: _Optional[str] = ..., layers: _Optional[int] = ..., preprocess_digest: _Optional[str] = ..., machine: _Optional[str] = ...) -> None: ...

class ProbeFrame(_message.Message):
    __slots__ = ("padding", "last", "answer_bytes")
    PADDING_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    padding: bytes
    last: bool
    answer_bytes: int
    def __init__(self, padding: _Optional[bytes] = ..., last: bool = ..., answer_bytes: _Optional[int] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("padding", "last", "received_bytes", "server_ns", "receive_ns", "load")
    PADDING_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVER_NS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_NS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    padding: bytes
    last: bool
    received_bytes: int
    server_ns: int
    receive_ns: int
    load: Load
    def __init__(self, padding: _Optional[bytes] = ..., last: bool = ..., received_bytes: _Optional[int] = ..., server_ns: _Optional[int] = ..., receive_ns: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("model_id", "warmup", "repetitions", "seconds", "fresh", "codecs", "weights_hash", "next")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    REPETITIONS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    warmup: int
    repetitions: int
    seconds: float
    fresh: bool
    codecs: _containers.RepeatedScalarFieldContainer[str]
    weights_hash: str
    next: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model_id: _Optional[str] = ..., warmup: _Optional[int] = ..., repetitions: _Optional[int] = ..., seconds: _Optional[float] = ..., fresh: bool = ..., codecs: _Optional[_Iterable[str]] = ..., weights_hash: _Optional[str] = ..., next: _Optional[_Iterable[str]] = ...) -> None: ...

class ProfileReply(_message.Message):
    __slots__ = ("progress", "profile")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    progress: ProfileProgress
    profile: bytes
    def __init__(self, progress: _Optional[_Union[ProfileProgress, _Mapping]] = ..., profile: _Optional[bytes] = ...) -> None: ...

class ProfileProgress(_message.Message):
    __slots__ = ("done", "total", "what")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    what: str
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ..., what: _Optional[str] = ...) -> None: ...
