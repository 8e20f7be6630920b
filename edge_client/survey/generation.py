"""What a plan of a generation is made of, measured now through a client: this side, a few split steps, the link."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from edge_client.client import EdgeClient
from edge_client.generation.link import SessionLink
from edge_client.planning.generation.choose import decide_generation
from edge_client.planning.generation.fitting import cloud_profile, head_profile, overhead_of
from edge_client.planning.generation.measured import Measured
from edge_client.planning.generation.workload import Workload
from edge_client.planning.objective import Constraints, Objective
from edge_client.screen.progress import progress
from edge_client.survey.decoding import StepSampler, survey_decoding
from edge_client.survey.probing import probe
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.profiling.decoding.measure import LENGTHS, Measurement

PROBE_SECONDS: Final = 2.0
QUICK_SECONDS: Final = 5.0


def gather_generation(
    client: EdgeClient, workload: Workload, *, model: Any = None, seconds: float = 20.0, show: bool = False
) -> Measured:
    """With ``client``'s model and server, about ``seconds``: replies here and split after the first and last block, in
    turns, to random prompts of several lengths. ``model``: of the same weights, in place of the client's.

    Raises SpecError, CutRefused (a model without blocks or one that cannot be split), and what requests raise.
    """
    if client.server is None:
        raise SpecError("a plan of a generation is measured with a server, and this client has none")
    own = client.wrapped.model if model is None else model
    measurement = Measurement(own, client.model_id, "edge", lengths=sorted({*LENGTHS, workload.prompt_tokens}))
    answer = workload.answer if workload.answer is not None and len(workload.answer) == 2 else None
    with progress("decoding", None, show) as advance:
        sampler = StepSampler(own, measurement, partial(SessionLink, client), answer)
        edge, samples = survey_decoding(measurement, sampler, seconds, advance)
    hidden = edge.blocks[0].hidden_bytes
    logits = round(workload.answer_bytes(1, edge.words, edge.word_bytes))
    with progress("probing the link", None, show) as advance:
        link, load = probe(
            client.server,
            sorted({0, hidden, hidden * edge.lengths[0], hidden * edge.lengths[-1], 64 << 10}),
            (0, logits, 4 * logits),
            PROBE_SECONDS,
            lambda *at: advance(at[2]),
            credentials=client.connection.credentials,
        )
    overhead = overhead_of(
        edge, samples, link, lambda tokens: Workload(answer=answer).answer_bytes(tokens, edge.words, edge.word_bytes)
    )
    cloud = cloud_profile(edge, samples, {"name": client.server})
    return Measured(edge, head_profile(edge, samples), cloud, link, overhead, load)


def best_generation_cut(
    client: EdgeClient,
    workload: Workload | None = None,
    *,
    model: Any = None,
    goal: str = "token",
    objective: Objective | None = None,
    constraints: Constraints | None = None,
    seconds: float = QUICK_SECONDS,
) -> str:
    """The block after which ``client``'s model is best cut for a generation, measured in ``seconds`` and a little more:
    of the cuts, whether or not everything here would be faster. Raises as `gather_generation` does, SpecError where
    constraints leave no candidate and CutRefused where they leave no cut.
    """
    workload = workload or Workload()
    found = gather_generation(client, workload, model=model, seconds=seconds).candidates(workload)
    best = decide_generation(found, goal, objective, constraints).best_cut
    if best is None:
        raise CutRefused("no cut is allowed: only the whole model here satisfies the constraints")
    return best.name
