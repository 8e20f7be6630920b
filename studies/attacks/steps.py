"""Steps of decoding sessions, recorded from real generations and mutated deep: ``python -m studies.attacks.steps``.

A session takes some honest steps; then comes one whose JSON or tensors were changed at a few places chosen anywhere in
them (values, state, calls, forms, references, order), and then the honest one again. What may come of a mutated step is
an answer or an error by name; what must come of the honest step behind a refused one is the recorded answer, bit for
bit. Beside them a session that nobody attacks takes its steps on the same model, and gives the recorded answers.

``--tally FILE`` keeps the counts, so that runs add up; each process and run has seeds of its own, and the file says
which. A failure names its seed and number.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import random
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from shared_hooks.errors import IsthmusError
from shared_hooks.generation import DecodingSession, DecodingTail, InProcess, SplitForward, StepReply
from studies.fuzz.alarm import TooLong, alarm

STEP_BYTES = 64 << 20
SECONDS = 20.0
HONEST_EVERY = 50
_SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "num_key_value_heads": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "Lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 64}),
    "Mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
}
CUT = "model.layers.1"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}
WILD: list[Any] = [
    None, True, False, -1, 0, 1, 3, 127, 2**31, 2**63, 10**30, 0.5, float("inf"), "", "x", "=", "__class__", "forward",
    [], {}, [[]], [None], ["v", 2**62], ["m", [2**40], [1], "float32"], ["m", [-1], [1], "float32"], ["c", "os:system"],
    ["o", "builtins:object", []], ["l", "", [[0, ["l", "", []]]]], ["+m", [1, 1], [1, 1]], ["+v", 2**60],
    ["i", "int64", [1] * 100], ["t", [["v", 1]]], "float32", "cuda:99", ["t", 0], ["t", 99], ["crop", [10**9]],
    ["reorder_cache", [[99, -99]]], ["__init__", []], ["update", []],
]  # fmt: skip


class Step(NamedTuple):
    header: dict[str, Any]
    tensors: list[torch.Tensor]
    reply: StepReply


class _Recorder(InProcess):
    def __init__(self, tail: DecodingTail) -> None:
        super().__init__(tail)
        self.recorded: list[Step] = []

    def step(self, session: int, number: int, header: Any, tensors: Any, *rest: Any) -> StepReply:
        kept = copy.deepcopy(header), [tensor.clone() for tensor in tensors]
        reply = super().step(session, number, header, tensors, *rest)
        self.recorded.append(Step(*kept, reply))
        return reply


class Target:
    """One model behind its cut, and what an honest client sent it."""

    def __init__(self, name: str, way: str) -> None:
        self.tail = DecodingTail(_made(name), CUT, step_bytes=STEP_BYTES)
        recorder, model = _Recorder(DecodingTail(_made(name), CUT)), _made(name)
        text = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9], [11, 3, 8, 11, 3, 8, 11, 3]])[: 1 if way == "lookup" else 2]
        torch.manual_seed(7)
        with SplitForward(model, CUT, recorder):
            model.generate(text, max_new_tokens=10, pad_token_id=0, **WAYS[way])  # type: ignore[operator]
        self.steps = recorder.recorded
        self.after: list[DecodingSession] = [self.tail.open()]
        for step in self.steps:
            session = self.after[-1].fork()
            if not answers(session, step):
                raise AssertionError(f"{name}, {way}: a recorded step is answered otherwise")
            self.after.append(session)


def _made(name: str) -> nn.Module:
    import transformers

    kind, more = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, kind)(getattr(transformers, kind).config_class(**{**_SIZES, **more})).eval()
    made.generation_config.eos_token_id = None
    return made  # type: ignore[no-any-return]


def taken(session: DecodingSession, header: Any, tensors: list[torch.Tensor]) -> Any:
    """What a step gives."""
    return session.step(json.loads(json.dumps(header)), [tensor.clone() for tensor in tensors])


def answers(session: DecodingSession, step: Step) -> bool:
    """Whether an honest step is answered as it was recorded."""
    header, tensors = taken(session, step.header, step.tensors)
    known = step.reply
    reported = json.dumps(header) == json.dumps(known.header) and len(tensors) == len(known.tensors)
    return reported and all(map(torch.equal, tensors, known.tensors))


def mutated(target: Target, number: int, draw: random.Random) -> tuple[Any, list[torch.Tensor]]:
    """The step of this number, changed at one to four places."""
    step = target.steps[number]
    if draw.random() < 0.1:  # another one: out of order, or twice
        step = draw.choice(target.steps)
    header, tensors = copy.deepcopy(step.header), [tensor.clone() for tensor in step.tensors]
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if tensors and draw.random() < 0.25:
            _tensor(tensors, target, draw)
        else:
            header = _node(header, target, draw)
    return header, tensors


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _node(header: Any, target: Target, draw: random.Random) -> Any:
    found = [path for path in _places(header) if path]
    if not found:
        return {"in": []}
    path = draw.choice(found)
    holder, key = _at(header, path[:-1]), path[-1]
    old, how = holder[key], draw.random()
    other = draw.choice(target.steps).header
    if how < 0.3 and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = draw.choice((old + 1, old - 1, 2 * old, -old, old * 1000, old**3 + 1, float(old), str(old), 0))
    elif how < 0.5:
        holder[key] = copy.deepcopy(draw.choice(WILD))
    elif how < 0.7:  # a part of another step, from anywhere
        holder[key] = copy.deepcopy(_at(other, draw.choice(list(_places(other)))))
    elif how < 0.8 and isinstance(holder, list):
        draw.choice((lambda: holder.pop(key), lambda: holder.insert(key, copy.deepcopy(old)),
                     lambda: draw.shuffle(holder), lambda: holder.extend(copy.deepcopy(holder) * 3)))()  # fmt: skip
    elif isinstance(holder, dict):
        names = [name for step in target.steps for name in step.header]
        draw.choice((lambda: holder.pop(key), lambda: holder.update({draw.choice(names): copy.deepcopy(old)})))()
    elif isinstance(old, list) and old:
        old.append(copy.deepcopy(draw.choice(old)))
    else:
        holder[key] = [copy.deepcopy(old)] * draw.choice((0, 1, 2, 50))
    return header


def _tensor(tensors: list[torch.Tensor], target: Target, draw: random.Random) -> None:
    at = draw.randrange(len(tensors))
    one, how = tensors[at], draw.randrange(8)
    if how == 0:
        tensors.pop(at)
    elif how == 1:
        tensors[at] = one[..., :1].clone() if one.dim() else one[None]
    elif how == 2:
        tensors[at] = torch.zeros(draw.choice(((0,), (1,), (3, 1, 9), (1 << 16,))), dtype=one.dtype)
    elif how == 3:
        tensors[at] = one.to(draw.choice((torch.float64, torch.int64, torch.bool, torch.float16, torch.complex64)))
    elif how == 4:
        tensors.append(one.clone())
    elif how == 5 and one.is_floating_point():
        one.fill_(draw.choice((float("nan"), float("inf"), 6e4, 0.0)))
    elif how == 6 and not (one.is_floating_point() or one.is_complex()):
        most = 1 if one.dtype is torch.bool else torch.iinfo(one.dtype).max
        one.fill_(min(most, draw.choice((0, 1, 119, 120, 2**31 - 1))))
    else:
        others = [tensor for step in target.steps for tensor in step.tensors]
        tensors[at] = draw.choice(others).clone()


def work(seed: int, seconds: float, mutations: int, queue: Any) -> None:
    """One process: reports (seed, counts, failures, MiB) every few seconds."""
    torch.set_num_threads(1)
    draw, targets = random.Random(seed), dict[tuple[str, str], Target]()
    names = [(name, way) for name in MODELS for way in WAYS]
    counted, failures, until, number = Counter[str](), list[str](), time.monotonic() + seconds, 0
    reported = time.monotonic()
    with torch.no_grad():
        while time.monotonic() < until and number < mutations:
            name = draw.choice(names)
            if name not in targets:
                targets[name] = Target(*name)
            found = _one(targets[name], draw, counted)
            number += 1
            if found:
                failures.append(f"{seed}:{number} {' '.join(name)}: {found}")
            if number % HONEST_EVERY == 0:
                target = targets[name]
                at = draw.randrange(len(target.steps))
                counted["honest beside"] += 1
                if not answers(target.after[at].fork(), target.steps[at]):
                    failures.append(f"{seed}:{number} {' '.join(name)}: an honest session beside is answered otherwise")
            if time.monotonic() > reported + 5:
                queue.put((seed, counted, failures, _mib()))
                counted, failures, reported = Counter(), [], time.monotonic()
    queue.put((seed, counted, failures, _mib()))
    queue.put(None)


def _one(target: Target, draw: random.Random, counted: Counter[str]) -> str:
    at = draw.randrange(len(target.steps))
    session = target.after[at].fork()
    header, tensors = mutated(target, at, draw)
    counted["mutations"] += 1
    try:
        with alarm(SECONDS):
            taken(session, header, tensors)
        counted["answered"] += 1
        return ""
    except IsthmusError as error:
        counted[type(error).__name__] += 1
    except TooLong:
        return "hangs"
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError, AssertionError):
        counted["the model's own error"] += 1  # which a server tells as ModelFailed
    except BaseException as error:
        return "".join(traceback.format_exception(error, limit=-3))[-600:] + json.dumps(header)[:400]
    try:
        return "" if answers(session, target.steps[at]) else "the honest step behind it is answered otherwise"
    except IsthmusError:
        counted["its session was lost"] += 1
        return ""


def _mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def main() -> int:
    """The exit status: 0 if nothing failed and memory stayed."""
    parser = argparse.ArgumentParser(prog="python -m studies.attacks.steps", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tally", type=Path, metavar="FILE", help="JSON, to which this run adds")
    options = parser.parse_args()
    kept: dict[str, Any] = {"counted": {}, "failures": [], "seeds": {}, "mib": {}}
    if options.tally and options.tally.exists():
        kept = json.loads(options.tally.read_text())
    seeds = [options.seed * 1000 + number for number in range(options.processes)]
    again = [seed for seed in seeds if str(seed) in kept["seeds"]]
    if again:
        print(f"seeds {again} are in {options.tally} already: take another --seed", file=sys.stderr)
        return 2
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    share = -(-options.mutations // options.processes)
    workers = [
        context.Process(target=work, args=(seed, 60 * options.minutes, share, queue), daemon=True) for seed in seeds
    ]
    for worker in workers:
        worker.start()
    counted, left = Counter(kept["counted"]), len(workers)
    while left:
        try:
            said = queue.get(timeout=3 * SECONDS)
        except Empty:
            died = [seed for seed, worker in zip(seeds, workers, strict=True) if worker.exitcode not in (None, 0)]
            kept["failures"] += [f"{seed}: the process died" for seed in died] or ["no word for a minute"]
            break
        if said is None:
            left -= 1
            continue
        seed, more, failures, mib = said
        counted.update(more)
        kept["failures"] += failures
        kept["seeds"][str(seed)] = kept["seeds"].get(str(seed), 0) + more["mutations"]
        kept["mib"].setdefault(str(seed), []).append(round(mib, 1))
        kept["counted"] = dict(counted)
        for one in failures:
            print(one, flush=True)
        if options.tally:
            options.tally.write_text(json.dumps(kept, indent=1) + "\n")
    flat = True
    for seed in seeds:
        looks = kept["mib"].get(str(seed), [])
        later = looks[len(looks) // 2 :]
        if later:
            grown = later[-1] - later[0]
            flat &= grown < 0.02 * later[0] + 8
            print(f"process {seed}: {later[0]:.0f} MiB half way, {later[-1]:.0f} in the end")
    print(", ".join(f"{name} {count:,}" for name, count in counted.most_common()))
    print(
        f"{counted['mutations']:,} mutated steps, {len(kept['failures'])} failures, memory {'flat' if flat else 'GREW'}"
    )
    return 0 if flat and not kept["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
