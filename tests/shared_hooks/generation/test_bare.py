"""Which modules carry a shim in a generation, and what happens when others have to be seen later."""

from __future__ import annotations

import torch
from torch import nn

from shared_hooks.generation import DecodingTail, InProcess, SplitForward
from shared_hooks.modules import attach
from tests.shared_hooks.generation.small import cut_of, make, prompt
from tests.zoo.compare import differences


def shimmed(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if attach.shim_of(module) is not None}


def test_modules_within_calls_run_bare_unless_hooked() -> None:
    here, there, whole = (make("llama") for _ in range(3))
    cut, given = cut_of("llama"), prompt(2)
    tail = DecodingTail(there, cut)
    blocks = {f"model.layers.{number}" for number in range(4)}
    with SplitForward(here, cut, InProcess(tail)) as split:
        assert "model.layers.0.self_attn.q_proj" in shimmed(here) & shimmed(there)
        found = here.generate(**given, max_new_tokens=8, do_sample=False)
        assert torch.equal(found, whole.generate(**given, max_new_tokens=8, do_sample=False))
        for side in (here, there):
            assert {path for path in shimmed(side) if path.startswith("model.layers.")} == blocks
            assert "lm_head" in shimmed(side), "what was never called may be called"
        # hooks are put on when they are asked for
        more = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
        for model in (here, whole):
            model.set_attn_implementation("eager")
        there.set_attn_implementation("eager")
        one, other = (model.generate(**given, max_new_tokens=6, do_sample=False, **more) for model in (here, whole))
        for part in ("sequences", "hidden_states", "attentions"):
            assert next(differences(one[part], other[part]), None) is None, part
        assert len(split.records) > 10
    tail.close()
    assert not shimmed(here) and not shimmed(there)


def test_a_module_that_was_not_called_keeps_its_shims() -> None:
    model = nn.ModuleDict({"read": nn.Sequential(nn.Linear(2, 2)), "seen": nn.Sequential(nn.Linear(2, 2))})
    model["blocks"] = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(3)])
    paths = {module: path for path, module in model.named_modules() if path}
    needed = attach.Needed(paths, {"", "blocks.1"})
    needed.attach()
    needed.called |= {model["read"], model["blocks"][0]}
    for _ in range(attach.QUIET_RUNS + 1):
        assert "read.0" in shimmed(model)
        needed.end_run()
    assert {"read.0", "blocks.0.0", "blocks.2.0"}.isdisjoint(shimmed(model))
    assert {"read", "seen", "seen.0", "blocks.0", "blocks.1", "blocks.1.0", "blocks.2"} <= shimmed(model)
    needed.detach()
    assert not shimmed(model)
    needed.attach()
    assert "read.0" not in shimmed(model)
    needed.need_all()
    assert shimmed(model) == set(paths.values())
    needed.detach()
    assert not shimmed(model)
