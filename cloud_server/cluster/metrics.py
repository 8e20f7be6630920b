"""The replicas' metrics on one page: each line with the replica that said it, and fronts' own beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

LABEL = "replica"


class Together(Collector):
    """``ask``: (name, metrics in Prometheus's text format) of each, now."""

    def __init__(self, ask: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._ask = ask

    def describe(self) -> list[Metric]:
        """None are foretold."""
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._ask():
            for family in text_string_to_metric_families(text):
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [_labelled(sample, replica) for sample in family.samples]
        yield from families.values()


def _labelled(sample: Sample, replica: str) -> Sample:
    return sample._replace(labels={**sample.labels, LABEL: replica})


def text(registry: CollectorRegistry) -> str:
    """What it collects now."""
    return generate_latest(registry).decode()
