"""Sample sensors while models run, in one background thread that the first measured forward starts.

A request never reads a sensor itself. A forward announces itself (`Sampler.touch`), and afterwards reads the samples of
its period (`Sampler.window`). The thread ends some seconds after the last forward and starts again with the next; a
forked child begins without one.

`throttling` says what slows a processor or a GPU down: heat, a weak power supply, a current limit. Sources:

* any Linux: cooling devices that are not fans and not at step 0, and the temperature of the hottest zone (Linux,
  Documentation/driver-api/thermal/sysfs-api.rst)
* x86: ``thermal_throttle/package_throttle_count``, which counts since boot
* a Raspberry Pi: ``vcgencmd get_throttled``, bits for now and since boot (Raspberry Pi documentation, vcgencmd)
* a Jetson: ``ocN_event_cnt`` of the hwmon ``soctherm_oc``, over-current since boot (Jetson Linux Developer Guide)
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import psutil

from shared_hooks.metrics.energy import Gpu, Machine, Meters, MeterUnavailable, find_meters
from shared_hooks.metrics.energy.boards import NvmlUtilisation
from shared_hooks.metrics.records import Reading

BITS: Final = ("under-voltage", "the firmware's limit of frequency", "heat (firmware)", "the soft limit of temperature")
"""Reasons of a Raspberry Pi: bits 0 to 3 are active reasons, 16 to 19 those since boot."""
_SLOWS: Final = re.compile(r"cpufreq|devfreq|^Processor$|-balanced$")
"""Types of cooling devices that lower a clock; others are fans."""
_THROTTLED: Final = re.compile(r"^throttled=0x([0-9a-fA-F]{1,8})\s*$")


@dataclass(frozen=True)
class Throttling:
    """Throttling at one moment. ``now``: active reasons; ``counts``: events since boot, by reason; a bit
    counts once.
    """

    now: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    hottest: tuple[str, float] | None = None
    """The hottest zone and its temperature in degrees Celsius."""

    def since(self, before: Throttling) -> tuple[str, ...]:
        """Return the reasons active at ``before`` or now, and those with new events in between."""
        more = [reason for reason, count in self.counts.items() if count > before.counts.get(reason, 0)]
        return tuple(dict.fromkeys((*before.now, *self.now, *more)))


def throttling(machine: Machine | None = None) -> Throttling:
    """Return the throttling of this machine, or of a recorded one. What cannot be read is omitted."""
    machine = machine or Machine()
    bits = _raspberry_pi(machine)
    now = [*(reason for bit, reason in enumerate(BITS) if bits >> bit & 1), *_cooling(machine)]
    counts = {reason: 1 for bit, reason in enumerate(BITS) if bits >> (16 + bit) & 1}
    counts.update(_events(machine))
    zones = list(_zones(machine))
    return Throttling(tuple(now), counts, max(zones, key=lambda zone: zone[1], default=None))


def _raspberry_pi(machine: Machine) -> int:
    if "Raspberry Pi" not in machine.board:
        return 0
    try:
        printed = _THROTTLED.match(machine.run(["vcgencmd", "get_throttled"]))
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(printed[1], 16) if printed else 0


def _cooling(machine: Machine) -> Iterator[str]:
    for device in sorted(machine.path("sys/class/thermal").glob("cooling_device*")):
        try:
            kind, step = machine.text(device / "type"), machine.number(device / "cur_state")
            if step and _SLOWS.search(kind):
                yield f"{kind} at step {step:g} of {machine.number(device / 'max_state'):g}"
        except MeterUnavailable:  # intel_powerclamp's state is -1 while it is idle
            continue


def _events(machine: Machine) -> Iterator[tuple[str, int]]:
    for reason, folder, pattern in (
        ("heat", "sys/devices/system/cpu", "cpu*/thermal_throttle/package_throttle_count"),
        ("over-current", "sys/class/hwmon", "hwmon*/oc*_event_cnt"),
    ):
        if files := sorted(machine.path(folder).glob(pattern)):
            yield reason, sum(_count(machine, file) for file in files)


def _count(machine: Machine, file: Path) -> int:
    try:
        return int(machine.number(file))
    except MeterUnavailable:
        return 0


def _zones(machine: Machine) -> Iterator[tuple[str, float]]:
    for zone in sorted(machine.path("sys/class/thermal").glob("thermal_zone*")):
        try:
            yield machine.text(zone / "type"), machine.number(zone / "temp") / 1e3
        except MeterUnavailable:  # a disabled zone returns an error, one below zero is not the hottest
            continue


# Values sampled in the background, and their figure for an interval of time: measured, estimated, or unavailable.


LENGTH = 4096
"""Samples kept: 80 s of those taken every 20 ms."""

REACH_NS = 1_000_000_000
"""Nanoseconds beyond the samples up to which a value is estimated; at least five periods."""


class Series:
    """Bounded series of samples, appended by one thread and read by any. Never locked while a sensor is read.

    ``what``: a short name of the source. ``period_ns``: the time between two samples.
    """

    def __init__(self, what: str, period_ns: int) -> None:
        self.what = what
        self.period_ns = period_ns
        self._words = SeriesNotes.of(what, period_ns)
        self._samples: deque[tuple[int, float]] = deque(maxlen=LENGTH)
        self._lock = threading.Lock()

    def append(self, at_ns: int, value: float) -> None:
        """Append a sample taken at ``at_ns`` of `time.perf_counter_ns`, later than those before it."""
        with self._lock:
            self._samples.append((at_ns, value))

    def clear(self) -> None:
        with self._lock:
            self._samples.clear()

    def __len__(self) -> int:
        return len(self._samples)

    def since(self, start_ns: int) -> Track:
        """Return the samples from ``start_ns`` on, and the two before it."""
        found: list[tuple[int, float]] = []
        before = 0
        with self._lock:
            for sample in reversed(self._samples):
                found.append(sample)
                before += sample[0] <= start_ns
                if before == 2:
                    break
        found.reverse()
        return Track(self._words, self.period_ns, [at for at, _ in found], [value for _, value in found])


@dataclass(frozen=True, slots=True)
class SeriesNotes:
    """Notes for the readings of one series."""

    measured: str
    estimated: str
    near: str
    too_few: Reading
    elsewhere: Reading

    @classmethod
    def of(cls, what: str, period_ns: int) -> SeriesNotes:
        every = f"{period_ns / 1e6:.0f} ms"
        return cls(
            f"{what}, sampled every {every}",
            f"share by time of {every} samples of {what}",
            f"{what}, from samples every {every}",
            Reading.unavailable(f"too few samples yet of {what}"),
            Reading.unavailable(f"no samples at that time of {what}"),
        )


class Track:
    """Samples around a forward.

    An interval is *measured* if it is at least two periods long and enclosed by samples; where a sample was late, its
    gap counts as the period. Any other interval near samples gets its share by time: *estimated*. Otherwise it is
    *unavailable*.
    """

    def __init__(self, words: SeriesNotes, period_ns: int, times: list[int], values: list[float]) -> None:
        self.times = times
        self.values = values
        self.period_ns = period_ns
        self._reach = max(REACH_NS, 5 * period_ns)
        self._words = words
        self._levels: dict[tuple[float, bool], Reading] = {}
        self._gaps: dict[int, tuple[Reading, Reading]] = {}  # by the sample after it: level and peak

    def growth(self, start: int, stop: int) -> Reading:
        """Return how much a counter grew between two times (`time.perf_counter_ns`)."""
        lacking = self._lacking(start, stop, 2)
        if lacking is not None:
            return lacking
        value = max(0.0, self._at(stop) - self._at(start))
        if self._is_measured(start, stop):
            return Reading(value, "measured", self._words.measured)
        return Reading(value, "estimated", self._words.estimated)

    def mean(self, start: int, stop: int) -> Reading:
        """Return a level's mean over the interval. A sample stands for the time since the one before it."""
        if gap := self._gap(start, stop):
            return self._of_gap(gap)[0]
        lacking = self._lacking(start, stop, 1)
        if lacking is not None:
            return lacking
        times, values, last = self.times, self.values, len(self.times) - 1
        first, final = min(last, bisect_left(times, start)), min(last, bisect_left(times, stop))
        if first == final or stop <= start:
            return self._level(values[final], start, stop)
        edges = [start, *times[first:final], stop]
        total = sum((edges[i + 1] - edges[i]) * values[first + i] for i in range(len(edges) - 1))
        return self._level(total / (stop - start), start, stop)

    def end(self, start: int, stop: int) -> Reading:
        """Return a level at the end of the interval."""
        if gap := self._gap(start, stop):
            return self._of_gap(gap)[0]
        lacking = self._lacking(start, stop, 1)
        if lacking is not None:
            return lacking
        return self._level(self.values[min(len(self.times) - 1, bisect_left(self.times, stop))], start, stop)

    def peak(self, start: int, stop: int) -> Reading:
        """Return a level's maximum in the interval, including the two samples that enclose it."""
        if gap := self._gap(start, stop):
            return self._of_gap(gap)[1]
        lacking = self._lacking(start, stop, 1)
        if lacking is not None:
            return lacking
        first = min(len(self.times) - 1, max(0, bisect_right(self.times, start) - 1))
        return self._level(max(self.values[first : bisect_left(self.times, stop) + 1]), start, stop)

    def _gap(self, start: int, stop: int) -> int:
        """Return the number of the sample that follows the interval, if it lies between two samples; the number of
        samples if it lies after the last. 0 where it contains a sample, or may have none.
        """
        times = self.times
        gap = bisect_left(times, start)
        if not gap or stop <= start:
            return 0
        until = times[gap] if gap < len(times) else times[-1] + self._reach
        return gap if stop <= until else 0

    def gap(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the times between which the interval lies, if no sample is between them; None where it contains one,
        or may have none.
        """
        gap = self._gap(start, stop)
        if not gap:
            return None
        return self.times[gap - 1], self.times[gap] if gap < len(self.times) else self.times[-1] + self._reach

    def _of_gap(self, gap: int) -> tuple[Reading, Reading]:
        """Return level and peak in a gap, shared by all layers shorter than a sample."""
        if (known := self._gaps.get(gap)) is None:
            values = self.values
            after = values[min(gap, len(values) - 1)]
            near = self._near(after), self._near(max(values[gap - 1], after))
            known = self._gaps[gap] = near
        return known

    def _near(self, value: float) -> Reading:
        return Reading(value, "estimated", self._words.near)

    def _level(self, value: float, start: int, stop: int) -> Reading:
        measured = self._is_measured(start, stop)
        reading = self._levels.get((value, measured))
        if reading is None:  # layers that are shorter than a sample share it
            reading = Reading(value, "measured", self._words.measured) if measured else self._near(value)
            self._levels[value, measured] = reading
        return reading

    def _lacking(self, start: int, stop: int, need: int) -> Reading | None:
        times = self.times
        if len(times) < need:
            return self._words.too_few
        if stop > times[-1] + self._reach or start < times[0] - self._reach:
            return self._words.elsewhere
        return None

    def _is_measured(self, start: int, stop: int) -> bool:
        if stop - start < 2 * self.period_ns:
            return False
        times = self.times
        first, final = bisect_right(times, start) - 1, bisect_left(times, stop)
        if first < 0 or final == len(times):
            return False
        return stop - start >= 2 * max(times[i + 1] - times[i] for i in range(first, final))

    def _at(self, when: int) -> float:
        """Return a counter's value, interpolated linearly."""
        times, values = self.times, self.values
        right = min(len(times) - 1, max(1, bisect_left(times, when)))
        left = right - 1
        slope = (values[right] - values[left]) / (times[right] - times[left])
        return values[left] + (when - times[left]) * slope


PERIOD_S = 0.02
SLOW_PERIOD_S = 0.1
"""Seconds between samples of what the kernel counts in ticks of 10 ms, or computes from hundreds of files."""
IDLE_S = 5.0


class LevelSensor(Protocol):
    """Reads a sensor whose value rises and falls; `read` raises MeterUnavailable."""

    name: str
    period_s: float

    def read(self) -> float: ...


class SensorChannel:
    """One series of samples and its sensor, or the reason why there is none."""

    def __init__(self, what: str, period_s: float, read: Callable[[], float]) -> None:
        self.series = Series(what, round(period_s * 1e9))
        self.read = read
        self.why: Reading | None = None
        self.due = 0.0

    def prime(self) -> None:
        """Discard a first sample and take the next one a period later."""
        self.sample()
        self.series.clear()
        self.due = time.monotonic() + self.series.period_ns / 1e9

    def sample(self) -> None:
        """Take a sample. A sensor that fails is not read again until the thread restarts."""
        try:
            before = time.perf_counter_ns()
            value = self.read()
        except Exception as error:  # whatever a sensor or its driver raises, requests continue
            self.lose(str(error) if isinstance(error, MeterUnavailable) else f"{type(error).__name__}: {error}"[:200])
            return
        # the middle of the reading; for a slow sensor that is the best estimate
        self.series.append((before + time.perf_counter_ns()) // 2, value)

    def lose(self, why: str) -> None:
        self.why = Reading.unavailable(why)
        self.series.clear()

    def since(self, start_ns: int) -> Track | Reading:
        return self.why if self.why is not None else self.series.since(start_ns)


Levels = tuple[Reading, Reading, Reading, Reading, Reading]
"""The process's memory at the end of an interval and its maximum; the means of processors, GPU and this machine's
memory.
"""


@dataclass
class SampleWindow:
    """The samples around one forward; a reading in place of a track gives the reason why there is none."""

    energy: Track | Reading
    """Cumulative joules of all devices that run the model."""
    resident: Track | Reading
    """Resident bytes of this process."""
    cpu: Track | Reading
    """Per cent of all processors."""
    memory: Track | Reading
    """Per cent of this machine's memory."""
    gpu: Track | Reading
    """Per cent of the time in which the GPU ran kernels."""
    _gap: tuple[int, int, Levels] | None = field(default=None, init=False, repr=False, compare=False)
    """Two times without a sample between them, and the levels of all intervals there."""

    def levels(self, start: int, stop: int) -> tuple[Levels, int]:
        """Return the levels of an interval, and the time until which those that begin later have the same; 0 if it has
        its own.
        """
        gap = self._gap
        if gap is not None and gap[0] < start < stop <= gap[1]:
            return gap[2], gap[1]
        track = self.resident
        memory = (track, track) if isinstance(track, Reading) else (track.end(start, stop), track.peak(start, stop))
        others = self.cpu, self.gpu, self.memory
        cpu, gpu, total = [one if isinstance(one, Reading) else one.mean(start, stop) for one in others]
        found = *memory, cpu, gpu, total
        gaps = [one.gap(start, stop) for one in (track, *others) if isinstance(one, Track)]
        within = [gap for gap in gaps if gap is not None]
        if len(within) < len(gaps):
            return found, 0
        until = min([before for _, before in within], default=sys.maxsize)
        self._gap = max([after for after, _ in within], default=0), until, found
        return found, until


SEARCHING = Reading.unavailable("sensors are still being looked for")
NO_GPU = Reading.unavailable("the model does not run on a GPU")


class Sampler:
    """The sampling thread and its series. ``find`` searches for energy meters, in the thread; the rest is for tests."""

    def __init__(
        self,
        find: Callable[[], Meters] = find_meters,
        *,
        utilisation: Callable[[Gpu], LevelSensor] = lambda gpu: NvmlUtilisation(Machine(), gpu),
        period_s: float = PERIOD_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._find = find
        self._utilisation = utilisation
        self._period_s = period_s
        self._idle_s = idle_s
        self.forget()

    def forget(self) -> None:
        """Reset in a child after a fork, which has no thread and may not use the drivers."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = 0.0
        self._meters: Meters | None = None
        self._devices: dict[Gpu | None, tuple[SensorChannel, SensorChannel | None] | None] = {None: None}
        self._process = psutil.Process()
        self._host = self._host_channels()
        self._taken = 0
        self._windows: dict[Gpu | None, tuple[int, int, SampleWindow]] = {}
        """The last window of each device: how often samples had been taken, where it starts, and itself."""

    def touch(self, gpu: Gpu | None = None) -> None:
        """Announce a measured forward on ``gpu`` or on the processor, so that samples are taken."""
        self._asked = time.monotonic()
        if gpu not in self._devices:
            self._devices[gpu] = None
        if self._thread is None:
            self._start()

    def window(self, start_ns: int, gpu: Gpu | None = None) -> SampleWindow:
        """Return the samples from ``start_ns`` (`time.perf_counter_ns`) on."""
        taken = self._taken  # before the series are read
        known = self._windows.get(gpu)
        if known is not None and known[0] == taken and known[1] <= start_ns:
            return known[2]
        channels = self._devices.get(gpu)
        energy, level = channels if channels is not None else (None, None)
        resident, cpu, memory = [channel.since(start_ns) for channel in self._host]
        window = SampleWindow(
            energy=SEARCHING if energy is None else energy.since(start_ns),
            resident=resident,
            cpu=cpu,
            memory=memory,
            gpu=NO_GPU if gpu is None else SEARCHING if level is None else level.since(start_ns),
        )
        self._windows[gpu] = taken, start_ns, window
        return window

    @property
    def running(self) -> bool:
        return self._thread is not None

    def stop(self) -> None:
        """End the thread, if there is one, and wait for it. The next measured forward starts another."""
        thread = self._thread
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="isthmus-sampler", daemon=True
                )
                self._thread.start()

    def _host_channels(self) -> tuple[SensorChannel, SensorChannel, SensorChannel]:
        process = self._process
        return (
            SensorChannel("resident set of the process", self._period_s, lambda: float(process.memory_info().rss)),
            SensorChannel(
                "processor utilisation of this machine", SLOW_PERIOD_S, lambda: psutil.cpu_percent(interval=None)
            ),
            SensorChannel("memory in use on this machine", SLOW_PERIOD_S, lambda: psutil.virtual_memory().percent),
        )

    def _run(self, stop: threading.Event) -> None:
        try:
            self._loop(stop)
        finally:
            with self._lock:
                if self._stop is stop:
                    self._thread = None

    def _loop(self, stop: threading.Event) -> None:
        # samples from before a pause do not cover the pause
        self._host = self._host_channels()
        self._host[1].prime()  # its first value is meaningless, later ones cover the time since the call before
        for gpu in list(self._devices):  # in place: a forward may add another one meanwhile
            self._devices[gpu] = None
        self._sample()
        if self._meters is None:
            self._meters = self._search()
        while not stop.is_set():
            for gpu, channels in list(self._devices.items()):
                if channels is None:
                    self._devices[gpu] = self._device_channels(self._meters, gpu)
            self._sample()
            if self._ends():
                return
            stop.wait(self._period_s)

    def _ends(self) -> bool:
        """Return whether no forward was announced for long. One announced meanwhile sees the thread, or starts one."""
        with self._lock:
            if time.monotonic() - self._asked <= self._idle_s:
                return False
            thread, self._thread = self._thread, None
            if time.monotonic() - self._asked <= self._idle_s:
                self._thread = thread
                return False
            return True

    def _search(self) -> Meters:
        try:
            return self._find()
        except Exception as error:  # a failed search costs only the energy figures
            return Meters(missing=(("search", f"{type(error).__name__}: {error}"[:200]),))

    def _device_channels(self, meters: Meters, gpu: Gpu | None) -> tuple[SensorChannel, SensorChannel | None]:
        energy = SensorChannel("energy meters", self._period_s, lambda: 0.0)
        try:
            own = meters.total(gpu)
            energy = SensorChannel(
                " + ".join(meter.name for meter in own),
                max(self._period_s, *(meter.period_s for meter in own)),
                lambda: sum(meter.read() for meter in own),
            )
        except MeterUnavailable as error:
            energy.lose(str(error))
        if gpu is None:
            return energy, None
        level = SensorChannel("GPU utilisation", SLOW_PERIOD_S, lambda: 0.0)
        try:
            source = self._utilisation(gpu)
            level = SensorChannel(source.name, max(self._period_s, source.period_s), source.read)
        except MeterUnavailable as error:
            level.lose(str(error))
        return energy, level

    def _sample(self) -> None:
        now = time.monotonic()
        pairs = list(self._devices.values())  # a forward on another device adds to them meanwhile
        channels = [*self._host, *(one for pair in pairs for one in pair or () if one is not None)]
        for channel in channels:
            if channel.why is None and channel.due <= now:
                channel.due = now + 0.9 * channel.series.period_ns / 1e9
                channel.sample()
        self._taken += 1


sampler = Sampler()
"""The sampler of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=sampler.forget)
atexit.register(sampler.stop)
