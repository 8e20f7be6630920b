"""Decode steps of several sessions run together, by the same steps run one after the other.

Two decoders in float32 with 8,000 words; the sessions' caches hold 12 to 90 tokens. After each step the caches
are cut back, so that all rounds do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_hooks.generation.together import Lockstep
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import cpu_ns, interleave, pairwise, ratio, spreads

NETWORKS = {"16 x 768": (16, 768, 12), "12 x 1024": (12, 1024, 16)}
LENGTHS = (17, 40, 64, 23, 90, 31, 55, 12) * 2
COUNTS = (1, 2, 4, 8, 16)
LIMITS = {1: 1.05, 8: 0.5}


def measure(options: Options) -> Row:
    lines, details = [], {}
    for name, (layers, width, heads) in NETWORKS.items():
        model = _decoder(layers, width, heads)
        with torch.no_grad(), Lockstep(model) as together:
            steps = [_step(model, length) for length in LENGTHS]
            for count in COUNTS:
                line, detail = _compared(together, steps[:count], name, options)
                lines.append(line)
                details[f"{name}, {count}"] = detail
    return Row(tuple(lines), details)


def _compared(
    together: Lockstep, steps: list[Callable[[], Any]], name: str, options: Options
) -> tuple[Line, dict[str, Any]]:
    run: dict[str, Callable[[], Any]] = {
        "together": lambda: [outcome.result() for outcome in together.run(steps)],
        "one by one": lambda: [step() for step in steps],
    }
    measured = interleave(run, options.repeats(20), cpu_ns)
    count = len(steps)
    share = ratio(measured["together"], measured["one by one"])
    spread = spreads(measured, 1e-9)
    rate = {way: count / one.median for way, one in spread.items()}
    note = f"{1 / share:.2f} times the tokens a second: {rate['together']:.0f} against {rate['one by one']:.0f}"
    line = Line(f"steps together, {name}, {count} sessions", share, "x", LIMITS.get(count), note)
    return line, {
        "seconds": {way: one.as_dict() for way, one in spread.items()},
        "ratio": pairwise(measured["together"], measured["one by one"]).as_dict(),
    }


def _decoder(layers: int, width: int, heads: int) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=width, intermediate_size=int(width * 2.75), num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    return model


def _step(model: nn.Module, length: int) -> Callable[[], torch.Tensor]:
    """One token after ``length`` others."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    token = torch.tensor([[7]])
    model(input_ids=torch.arange(length)[None], past_key_values=cache, logits_to_keep=1)

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=token, past_key_values=cache).logits
        cache.crop(-1)
        return logits

    return step
