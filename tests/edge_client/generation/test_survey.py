"""Steps at two cuts, through a link in this process, make both sides' profiles."""

from __future__ import annotations

import torch

from edge_client.generation.survey import StepSampler, survey_decoding
from edge_client.planning.generation import cloud_profile, head_profile, overhead_of
from shared_hooks.generation import DecodingTail, InProcess
from shared_hooks.profiling.decoding import DecodingMeasurement
from tests.shared_hooks.generation.small import make, prompt


def test_samples_are_of_both_cuts_prompts_and_steps_and_the_model_stays_as_it_was() -> None:
    model = make("llama")
    before = model.generate(**prompt(), max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    measurement = DecodingMeasurement(model, "llama", "edge", lengths=(8, 64))
    sampler = StepSampler(model, measurement, lambda cut: InProcess(DecodingTail(make("llama"), cut)))
    edge, samples = survey_decoding(measurement, sampler, 0)
    assert {(one.cut, one.prompt) for one in samples} == {(0, True), (0, False), (3, True), (3, False)}
    assert {one.tokens for one in samples if one.prompt} == {8, 64}
    assert all(one.wait_ns >= one.server_ns > 0 for one in samples)
    known = overhead_of(edge, samples, None, lambda tokens: tokens * 120 * 4)
    assert 0 < known.step_up.at(64) < 1000  # of headers, beside 128 bytes of hidden state
    cloud, head = cloud_profile(edge, samples, {}), head_profile(edge, samples)
    assert [one.name for one in cloud.blocks] == [one.name for one in head.blocks] == measurement.blocks
    assert torch.equal(before, model.generate(**prompt(), max_new_tokens=8, do_sample=False))  # type: ignore[operator]
