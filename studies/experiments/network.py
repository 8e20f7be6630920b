"""Two network namespaces, a cable between them, and a token bucket at each end of it.

    edge namespace                        cloud namespace
    10.213.77.1  veth ===[ token buckets ]=== veth  10.213.77.2

The buckets (tc-tbf) shape what leaves each end, so both directions have the same rate, and `Network.rate` changes it
while traffic flows. A bucket holds 10 ms of its rate, 16 KiB at least; the queue before it 100 ms, 64 KiB at least.
Latency is the relay's business. Only this cable exists in the namespaces: nothing leaves the machine.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from types import TracebackType

EDGE, CLOUD = "isthmus-edge", "isthmus-cloud"
EDGE_ADDRESS, CLOUD_ADDRESS = "10.213.77.1", "10.213.77.2"
VETH = "isthmus0"  # the cable's end in either namespace
BURST_SECONDS, LEAST_BURST = 0.010, 16 << 10
QUEUE_SECONDS, LEAST_QUEUE = 0.100, 64 << 10
LARGEST_SEGMENT = 8 << 10  # bytes handed to the bucket at once: it would forgive what is larger than its burst


class Network:
    """Use as a context manager; what an earlier crash left behind is removed first.

    ``ends``: the namespaces, with the address of each; ``made``: those that it makes and removes, where the others are
    another network's, for a chain of cables.
    """

    def __init__(
        self,
        ends: Mapping[str, str] = {EDGE: EDGE_ADDRESS, CLOUD: CLOUD_ADDRESS},
        veth: str = VETH,
        made: Iterable[str] = (EDGE, CLOUD),
    ) -> None:
        self.ends, self.veth, self.made = dict(ends), veth, tuple(made)

    def __enter__(self) -> Network:
        self.close()
        try:
            for name in self.made:
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            first, second = self.ends
            peer = ("peer", "name", self.veth, "netns", second)
            _run("ip", "-n", first, "link", "add", self.veth, "type", "veth", *peer)
            for name, address in self.ends.items():
                _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", self.veth)
                _run("ip", "-n", name, "link", "set", self.veth, "gso_max_size", str(LARGEST_SEGMENT))
                _run("ip", "-n", name, "link", "set", self.veth, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def rate(self, mbits: float) -> None:
        """Both directions carry ``mbits`` million bits a second from now on."""
        per_second = mbits * 1e6 / 8
        burst = max(LEAST_BURST, round(per_second * BURST_SECONDS))
        limit = max(LEAST_QUEUE, round(per_second * QUEUE_SECONDS)) + burst
        for name in self.ends:
            bucket = ("tbf", "rate", f"{round(mbits * 1e6)}bit", "burst", f"{burst}b", "limit", f"{limit}b")
            _run("tc", "-n", name, "qdisc", "replace", "dev", self.veth, "root", *bucket)

    def close(self) -> None:
        """Remove the namespaces, and with them the cable; may be repeated."""
        there = {line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()}
        for name in {*self.made} & there:
            _run("ip", "netns", "delete", name)


def inside(namespace: str, *words: str) -> list[str]:
    """The command ``words``, to be run in a namespace."""
    return ["ip", "netns", "exec", namespace, *words]


def _run(*words: str) -> str:
    """Standard output; OSError with what the tool said when it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
