"""The ways of `generate()`, one function each: what is to be the same of a split model and a whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared_hooks.generation import is_state
from studies.generation.cases import Judge, Look, facts, places
from studies.generation.forked import Tell
from studies.generation.small import built
from studies.generation.subject import Built, Subject

TOKENS = 32
SAMPLED = {"do_sample": True, "temperature": 0.9}
Mode = Callable[[Any, dict[str, Any]], Any]
"""Takes a model and the arguments of its ``generate``."""


def reported(output: Any) -> dict[str, Any]:
    """An output of ``generate`` without its cache, whose tensors are partly elsewhere."""
    kept = {name: value for name, value in output.items() if not is_state(value)}
    return {name: kept[name] for name in sorted(kept)}


def settings(**given: Any) -> Mode:
    """Tokens under these settings of ``generate``."""
    return lambda model, inputs: model.generate(**inputs, **{"max_new_tokens": TOKENS, "do_sample": False, **given})


def outputs(**given: Any) -> Mode:
    """All that ``generate`` returns under these settings."""
    made = settings(return_dict_in_generate=True, **given)
    return lambda model, inputs: reported(made(model, inputs))


def streamed(model: Any, inputs: dict[str, Any]) -> Any:
    """What a streamer is given, piece by piece."""
    from transformers.generation.streamers import BaseStreamer

    class Kept(BaseStreamer):
        def __init__(self) -> None:
            self.pieces: list[Any] = []

        def put(self, value: Tensor) -> None:
            self.pieces.append(value.tolist())

        def end(self) -> None:
            self.pieces.append("end")

    kept = Kept()
    tokens = settings(streamer=kept)(model, inputs)
    return [tokens, kept.pieces]


def stopped(model: Any, inputs: dict[str, Any]) -> Any:
    """Until a criterion of the caller's, which looks at the tokens and the scores."""
    from transformers import StoppingCriteria

    class Sum(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            full = input_ids.shape[1] % 3 == 0 and int(input_ids[:, -1].sum()) % 4 == 0
            return torch.full((len(input_ids),), full or input_ids.shape[1] > TOKENS)

    return settings(stopping_criteria=[Sum()], return_dict_in_generate=True, output_scores=True)(model, inputs)[
        "sequences"
    ]


def processed(model: Any, inputs: dict[str, Any]) -> Any:
    """With a processor of the caller's own."""
    from transformers import LogitsProcessor

    class Uneven(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores - scores.roll(1, -1).clamp(min=0) * 0.1

    return settings(logits_processor=[Uneven()], **SAMPLED)(model, inputs)


def turns(model: Any, inputs: dict[str, Any]) -> Any:
    """A second turn that continues with the cache of the first."""
    first = model.generate(**inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    return [first.sequences, *_on(model, inputs, first)]


def _on(model: Any, inputs: dict[str, Any], first: Any, cache: Any = None, words: int = 3) -> list[Tensor]:
    """Generate on from an output, after some more words of the user's."""
    rows = len(first.sequences)
    more = torch.arange(20, 20 + words).expand(rows, words)
    longer = torch.cat([first.sequences, more], 1)
    given = {name: value for name, value in inputs.items() if name == "attention_mask"}
    if model.config.is_encoder_decoder:
        given = dict(inputs) | {"decoder_input_ids": longer}
    else:
        grown = longer.shape[1] - inputs["attention_mask"].shape[1]
        mask = inputs["attention_mask"]
        given = {"input_ids": longer, "attention_mask": torch.cat([mask, mask.new_ones(rows, grown)], 1)}
    cache = first.past_key_values if cache is None else cache
    return [model.generate(**given, past_key_values=cache, max_new_tokens=8, do_sample=False)]


def forked(model: Any, inputs: dict[str, Any]) -> Any:
    """Two ways on from copies of one cache, and then from itself."""
    first = model.generate(**inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    copies = [copy.deepcopy(first.past_key_values) for _ in range(2)]
    found = [first.sequences]
    for words, cache in enumerate(copies, 2):
        found += _on(model, inputs, first, cache, words)
    return found + _on(model, inputs, first)


MODES: dict[str, Mode] = {
    "greedy": settings(),
    "sampled": settings(**SAMPLED),
    "beams": settings(num_beams=3),
    "beams, length penalty": settings(num_beams=3, length_penalty=0.5, early_stopping=True, num_return_sequences=2),
    "beams sampled": settings(num_beams=3, **SAMPLED),
    "beams, scores": outputs(num_beams=3, output_scores=True, output_logits=True),
    "beams, diverse groups": settings(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    "beams, constrained": settings(num_beams=3, force_words_ids=[[17, 18]]),
    "contrastive": settings(penalty_alpha=0.6, top_k=4),
    "layers contrasted (DoLa)": settings(dola_layers="low"),
    "several sequences": settings(num_return_sequences=2, **SAMPLED),
    "cache off": settings(use_cache=False),
    "cache dynamic": settings(cache_implementation="dynamic"),
    "cache static": settings(cache_implementation="static", disable_compile=True),
    "cache static, sampled": settings(cache_implementation="static", disable_compile=True, **SAMPLED),
    "cache static, beams": settings(cache_implementation="static", disable_compile=True, num_beams=2),
    "cache sliding window": settings(cache_implementation="sliding_window", disable_compile=True),
    "cache hybrid": settings(cache_implementation="hybrid", disable_compile=True),
    "cache offloaded": settings(cache_implementation="offloaded"),
    "cache offloaded static": settings(cache_implementation="offloaded_static", disable_compile=True),
    "cache quantized fp8": settings(cache_implementation="quantized", cache_config={"backend": "fp8"}),
    "cache quantized quanto": settings(
        cache_implementation="quantized", cache_config={"backend": "quanto", "nbits": 4, "residual_length": 8}
    ),
    "cache quantized hqq": settings(
        cache_implementation="quantized",
        cache_config={"backend": "hqq", "nbits": 4, "residual_length": 8, "axis_key": 1, "axis_value": 1},
    ),
    "lookup": settings(prompt_lookup_num_tokens=4),
    "lookup sampled": settings(prompt_lookup_num_tokens=4, **SAMPLED),
    "assisted": settings(num_assistant_tokens=4),
    "assisted sampled": settings(num_assistant_tokens=4, **SAMPLED),
    "early exit": settings(assistant_early_exit=2),
    "chunked prefill": settings(prefill_chunk_size=4),
    "penalties": settings(repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[33], [34, 35]]),
    "samplers": settings(do_sample=True, min_p=0.02, typical_p=0.95, epsilon_cutoff=1e-3, renormalize_logits=True),
    "bias and length": settings(sequence_bias={(21,): 2.0}, min_new_tokens=8),
    "guidance": settings(guidance_scale=1.5),
    "own processor": processed,
    "own criterion": stopped,
    "streamer": streamed,
    "scores and logits": outputs(output_scores=True, output_logits=True, **SAMPLED),
    "hidden states": outputs(output_hidden_states=True),
    "attentions": outputs(output_attentions=True),
    "two turns": turns,
    "copies of a cache": forked,
}
ONE_ROW = ("lookup", "lookup sampled", "assisted", "assisted sampled", "early exit", "streamer", "contrastive")
"""What transformers does for one row only."""
ASSISTED = ("assisted", "assisted sampled")
"""What is given a model that drafts."""


def zoo() -> list[Subject]:
    """Architectures that differ in what they keep between steps."""
    return [
        Subject("LlamaForCausalLM", "llama", ("causal",)),
        Subject("GPT2LMHeadModel", "gpt2", ("causal",)),
        Subject("Gemma2ForCausalLM", "gemma2", ("causal",)),
        Subject("Gemma3ForCausalLM", "gemma3_text", ("causal",)),
        Subject("MistralForCausalLM", "mistral", ("causal",), {"sliding_window": 8}),
        Subject("MixtralForCausalLM", "mixtral", ("causal",)),
        Subject("MambaForCausalLM", "mamba", ("causal",)),
        Subject("Qwen3NextForCausalLM", "qwen3_next", ("causal",)),
        Subject("Lfm2ForCausalLM", "lfm2", ("causal",)),
        Subject("BloomForCausalLM", "bloom", ("causal",)),
        Subject("OPTForCausalLM", "opt", ("causal",)),
        Subject("T5ForConditionalGeneration", "t5", ("sequence-to-sequence",)),
        Subject("BartForConditionalGeneration", "bart", ("sequence-to-sequence",)),
        Subject("WhisperForConditionalGeneration", "whisper", ("speech",)),
        Subject("LlavaForConditionalGeneration", "llava", ("image-text",)),
    ]


def modes(look: Look, subject: Subject, tell: Tell) -> None:
    """Every mode in float32, three rows where it takes them, and some in bfloat16."""
    found = built(subject)
    tell(facts(found))
    for dtype, names in (
        (torch.float32, list(MODES)),
        (torch.bfloat16, ["greedy", "sampled", "beams", "cache static"]),
    ):
        _in_dtype(look, found, dtype, names, tell)


def _in_dtype(look: Look, found: Built, dtype: torch.dtype, names: list[str], tell: Tell) -> None:
    judge = Judge(found, look.engine, dtype=dtype)
    for name in names:
        label = name if dtype == torch.float32 else f"{name}, bfloat16"
        if look.only not in label:
            continue
        inputs = _cast(found.inputs(1 if name in ONE_ROW else 3, 1), dtype)
        if name in ASSISTED:
            inputs["assistant_model"] = _draft(found, dtype)
        for place, cut in places(found.blocks).items():
            if place in look.cuts:
                tell({"at": f"{label} @ {place}"})
                outcome = judge.outcome(label, lambda model, name=name, inputs=inputs: _do(name, model, inputs), cut)
                tell({"case": f"{label} @ {place}", **outcome})


def _do(name: str, model: Any, inputs: dict[str, Any]) -> Any:
    return MODES[name](model, copy.deepcopy(inputs))


def _draft(found: Built, dtype: torch.dtype) -> Any:
    """A model that is often right: the same with noise."""
    model = found.build()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
