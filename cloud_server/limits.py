"""What clients may ask of the server: every bound on size, count and time, in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shared_hooks import RehearsalLimits
from shared_hooks.errors import SpecError
from shared_hooks.models.images import MAX_PIXELS

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

NEVER = 1 << 62
"""A bound that nothing reaches: there is none unless it is set."""

LONGEST_SECONDS = 1_000_000.0
"""The longest wait that Python and gRPC accept everywhere."""

LONGEST_DELAY = 1_000_000
"""Microseconds."""


@dataclass(frozen=True)
class FileLimits:
    """What an input file may become: `Limits.max_file_pixels` and `Limits.max_file_examples`."""

    pixels: int = MAX_PIXELS
    examples: int = 64


@dataclass(frozen=True)
class Limits:
    """Bounds in bytes, counts and seconds. Raises SpecError, naming the field, for values that cannot work."""

    max_request_bytes: int = 256 * MIB
    """Payload of one request: as sent, as decoded, and the storages of its tensors."""
    max_in_flight: int = 32
    """Requests of one client that are received, waiting or running at a time."""
    max_clients: int = 64
    """Standing streams at a time."""
    max_pending: int = 512
    """Requests of all clients that are received, waiting or running at a time."""
    max_pending_bytes: int = 2 * GIB
    """Payload and header bytes of these requests together."""
    max_message_bytes: int = 4 * MIB
    """One frame: a chunk, a header or the description of a cut."""
    chunk_bytes: int = 512 * KIB
    """Size of the chunks in which answers are sent."""
    max_frames_share: float = 0.25
    """Share of one processor's time for taking the frames of one account while others send, too; beyond that they wait.
    """
    max_cut_bytes: int = 2 * MIB
    """Description of one cut."""
    max_cuts: int = 1024
    """Descriptions kept, of all clients together."""
    max_cuts_bytes: int = 256 * MIB
    """Memory that these take once they are read, some 10 to 40 times their size."""
    max_recipes: int = 1024
    """Recipes (what the tail does at one cut) that a model's engine works out and keeps."""
    max_recipe_steps: int = 1_000_000
    """Steps of these recipes together; one takes half a KiB of memory, and so does half a KiB of a cut that is read."""
    max_rehearsal_seconds: float = 20.0
    """Time for one of them; meanwhile its worker serves no other request."""
    max_trial_seconds: float = 60.0
    """Time for a process that tries a model's cuts before they are served; the first client of a cut waits so long."""
    rehearsal_seconds_per_minute: float = 30.0
    """Time to work them out in any minute; beyond it, who has had an equal part of it is postponed."""
    rehearsal_seconds_per_account: float = 20.0
    """The part of it that one account may take."""
    max_operations: int = 400_000
    """Kernels that a model may run on one request, as far as can be foreseen."""
    max_constant_bytes: int = GIB
    """Memory that a model's constants may take before the cut (masks, positions), as the inputs' form makes them."""
    max_elements: int = 1 << 36
    """Elements of all results of one request, as far as can be foreseen: a bound on a tail's work before it starts."""
    max_tail_bytes: int = 8 * GIB
    """Memory that the results of a tail may take at one moment, as far as can be foreseen."""
    max_compute_seconds: float = 120.0
    """Time that a worker computes on one request; after that it is ended when it returns to Python code."""
    max_worker_bytes: int = NEVER
    """Resident memory of a worker process's own: beyond it another takes its place, between two requests."""
    max_worker_requests: int = NEVER
    """Requests that a worker process answers before another takes its place."""
    worker_crashes_per_minute: int = 6
    """Worker processes that one account's requests may end by a crash or a hang; then it is refused for a while."""
    max_model_bytes: int = NEVER
    """Weights of all models in memory, on each device: beyond it those that are used least give theirs up, with their
    recipes, until they are asked for again.
    """
    model_turn_seconds: float = 20.0
    """How long a model stays where others are wanted as much; ten times as long as it took to load, at least."""
    max_sessions: int = 1024
    """Decoding sessions at a time."""
    max_sessions_per_account: int = 256
    """Those of one account."""
    max_session_bytes: int = 2 * GIB
    """Memory of one of them, beyond which it takes no more steps."""
    max_sessions_bytes: int = 8 * GIB
    """Memory of all of them together."""
    max_sessions_bytes_per_account: int = 4 * GIB
    """The same of one account's."""
    session_idle_seconds: float = 600.0
    """How long a decoding session is kept without a step."""
    max_batch_size: int = 16
    """Rows of requests at one cut, or steps of decoding sessions, that are computed together, of clients that allow
    it.
    """
    preferred_batch_size: tuple[int, ...] = ()
    """Rows that are best computed together: where as many wait, so many are taken, and none waits for more."""
    max_queue_delay_microseconds: int = 0
    """How long an otherwise idle worker holds such a request or step, for others to join."""
    max_queue_size: int = NEVER
    """Requests of one model that wait for a worker."""
    max_frames_bytes: int = 256 * MIB
    """Symbols that one model keeps of clients' last frames, for the differences to them (codec "frames")."""
    max_answers: int = 4096
    """Answers kept until they are acknowledged."""
    max_answer_bytes: int = 512 * MIB
    """Memory of these answers together, of those that wait on streams, too; so of any one."""
    max_file_pixels: int = MAX_PIXELS
    """Most pixels of an image that comes as a file, as it is and as it is scaled."""
    max_file_examples: int = 64
    """How many times the size of its model's example an input file's tensors may have: a bound on the model's work,
    where nothing is rehearsed.
    """
    max_inference_bytes: int = 512 * MIB
    """Messages of the Open Inference Protocol that arrive by HTTP, and its answers until they are fetched, together."""
    answer_seconds: float = 120.0
    """How long an answer is kept until it is acknowledged, or requested again after a lost connection; by HTTP, until
    it is fetched.
    """
    deadline_seconds: float = 60.0
    """Age at which a request is no longer started; a request may ask for less."""
    hello_seconds: float = 10.0
    """Time from the opening of a stream to its first frame."""
    log_lines_per_account: int = 60
    """Log lines a minute that one identity, or one address, may cause; the rest is counted. Warnings count apart."""
    log_lines_per_minute: int = 300
    """The same of all of them together."""
    heartbeat_seconds: float = 0.25
    """The shortest time between two signs of life on a stream that a client may ask for."""
    idle_seconds: float = 1.0
    """Silence of a stream with nothing under way, or of an upload, after which its place goes to who needs it."""
    drain_seconds: float = 30.0
    """Time that running requests have to finish after SIGTERM."""
    max_probes: int = 16
    """Streams that measure the link at a time."""
    max_probes_per_account: int = 4
    """Those of one account."""
    probe_bytes_per_minute: int = 2 * GIB
    """What one account's probes may send and fetch in a minute."""
    max_probe_rounds: int = 10_000
    """Rounds on one of them; a round's payload and its answer are bounded as a request's payload is."""
    probe_idle_seconds: float = 60.0
    """Time between two rounds."""
    max_profiles: int = 4
    """Profiles that are measured (one) or waited for at a time."""
    max_profiles_per_account: int = 2
    """Those of one account."""
    profiles_per_minute: int = 6
    """Profiles that are measured for one account in a minute; those at hand cost nothing."""
    max_profile_repetitions: int = 1000
    """Repetitions of every measurement, and of its warm-up."""
    max_profile_seconds: float = 60.0
    """Time for one profile; meanwhile its worker serves no other request."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "max_queue_delay_microseconds":
                if not 0 <= value <= LONGEST_DELAY:
                    raise SpecError(f"limits.{field.name}: expected 0 to {LONGEST_DELAY}, found {value}")
            elif field.name == "preferred_batch_size":
                if not all(0 < size <= self.max_batch_size for size in value):
                    raise SpecError(f"limits.{field.name}: expected sizes of 1 to max_batch_size, found {list(value)}")
            elif not value > 0:  # rejects NaN, too
                raise SpecError(f"limits.{field.name}: expected a number above 0, found {value}")
            if field.name.endswith("_seconds") and value > LONGEST_SECONDS:
                raise SpecError(f"limits.{field.name}: expected at most {LONGEST_SECONDS:.0f}, found {value}")
        if self.chunk_bytes + 64 * KIB > self.max_message_bytes:
            raise SpecError(
                f"limits.chunk_bytes: expected at least 64 KiB below max_message_bytes ({self.max_message_bytes}), "
                f"found {self.chunk_bytes}"
            )
        if self.max_request_bytes > self.max_pending_bytes:
            raise SpecError(
                f"limits.max_request_bytes: expected at most max_pending_bytes ({self.max_pending_bytes}), "
                f"found {self.max_request_bytes}"
            )

    def files(self) -> FileLimits:
        """Return the limits on input files."""
        return FileLimits(self.max_file_pixels, self.max_file_examples)

    def rehearsals(self) -> RehearsalLimits:
        """Return the limits on working out the tails of clients' cuts."""
        return RehearsalLimits(
            operations=self.max_operations,
            native_bytes=self.max_constant_bytes,
            elements=self.max_elements,
            seconds=self.max_rehearsal_seconds,
            recipes=self.max_recipes,
            steps=self.max_recipe_steps,
            seconds_a_minute=self.rehearsal_seconds_per_minute,
            seconds_a_minute_each=self.rehearsal_seconds_per_account,
            held_bytes=self.max_tail_bytes,
        )
