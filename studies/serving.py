"""`edge-client serve`, measured.

    python -m studies.serving [first-token] [--model SPEC --cut CUT] [--tokens 1000] [--json FILE]
    python -m studies.serving drafts ...      tokens a second over 40 ms with drafts and without, ten prompts
    python -m studies.serving sessions ...    tokens a second of 1, 8 and 32 texts at once, and of `generate_batch`
    python -m studies.serving divided ...     a server whose weights are divided among --processes: tokens, time, memory

Without a model a Llama with random weights, 8 blocks 512 wide (``divided``: in a folder of its own; a --model there is
a spec whose factory is from_pretrained). The prompts of ``first-token`` are token ids, drawn; each pair begins with its
own; times are those of the first event of a stream.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import runpy
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import torch

from edge_client import ConnectionOptions, EdgeClient, local_server
from edge_client.generation import SplitGenerator
from edge_client.generation.drafting import DraftSource, FirstLayers, Lookup
from edge_client.model_choice import ModelChoice
from edge_client.serving.app import Endpoint
from edge_client.serving.chats import Chats, TextTask
from edge_client.serving.sampling import Sampling
from shared_hooks.models import load_spec
from studies.experiments.relay import Relay

ROOT = Path(__file__).parents[1]


def model(width: int = 512) -> Any:
    """See the module."""
    import transformers

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 8, "num_attention_heads": 8}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=384, max_position_embeddings=2048, **sizes)
    )


def tokenizer() -> Any:
    """That of the example."""
    return runpy.run_path(str(ROOT / "examples" / "language_model.py"))["tokenizer"]()


SPEC = """
id = "speaker"
factory = "studies.serving:model"
tokenizer = "studies.serving:tokenizer"
[call_kwargs]
use_cache = false
[example.kwargs.input_ids]
shape = [1, 8]
dtype = "int64"
high = 384
"""


def first_token(url: str, name: str, ids: list[int]) -> tuple[float, int]:
    """Seconds until the first piece, and tokens of the prompt that were not read again."""
    body = {"model": name, "prompt": ids, "max_tokens": 2, "temperature": 0, "stream": True}
    began, first, kept = time.perf_counter(), 0.0, 0
    with httpx.stream("POST", f"{url}/completions", json={**body, "stream_options": {"include_usage": True}}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                usage = json.loads(line[6:]).get("usage")
                kept = usage["prompt_tokens_details"]["cached_tokens"] if usage else kept
    return first, kept


def first_tokens(options: argparse.Namespace, spec: str) -> dict[str, Any]:
    """How soon the first token of a prompt comes whose beginning another chat has read."""
    dice = random.Random(0)
    with (
        local_server(spec) as server,
        EdgeClient(server, spec) as client,
        closing(Chats(client, options.cut, seats=2)) as chats,
        Endpoint(chats, "0") as endpoint,
    ):
        rows = []
        for _ in range(options.pairs + 1):
            common = [dice.randrange(5, 300) for _ in range(options.tokens)]
            pair = [[*common, *(dice.randrange(5, 300) for _ in range(12))] for _ in range(2)]
            rows.append([first_token(endpoint.url, endpoint.model, ids) for ids in pair])
    rows = rows[1:]  # without the first pair, which plans
    read, known = (statistics.median(row[at][0] for row in rows) for at in (0, 1))
    kept = min(row[1][1] for row in rows)
    return {"first_token_s": read, "first_token_known_s": known, "ratio": known / read, "kept": kept}


STORY = (
    "Mara kept the lighthouse alone. Every evening she climbed the ninety-one steps, lit the lamp, wrote the weather "
    "into the book and looked for the ferry. On the third of March the ferry did not come."
)
PROGRAM = (
    "def total(prices, discount):\n    amount = 0\n    for price in prices:\n        amount = amount + price\n"
    "    return amount - amount * discount\n"
)
PROMPTS = {
    "quoting": [
        f"Repeat this text word for word, then name who it is about: {STORY}",
        f"Rename the variable amount to result and give the whole function:\n{PROGRAM}",
        f"Add a docstring to this function and give all of it:\n{PROGRAM}",
        f"Correct the mistakes, if there are any, and give the whole text: {STORY}",
    ],
    "lists": [
        "List the numbers from 1 to 30, each on a line of its own.",
        "Write the days of the week five times.",
        "Write a table of the squares of 1 to 15, a line each.",
    ],
    "free": [
        "Why is the sky blue?",
        "Write a short poem about a river.",
        "What should I think of before I buy a bicycle?",
    ],
}
"""Ten, of three kinds: much of the answer stands in the prompt, in the answer itself, or nowhere."""


def drafts(options: argparse.Namespace, spec: str) -> dict[str, Any]:
    """Tokens a second over a link with ``--delay``, greedy, with drafts of each source and without: step by step, and
    sent ahead while those before them are verified. Each side computes with one thread.
    """
    sources: dict[str, DraftSource | None] = {"none": None}
    for name, source in {"lookup": Lookup(), "first layers": FirstLayers(options.cut)}.items():
        sources |= {name: source, f"{name}, ahead": source}
    rates: dict[str, list[float]] = {name: [] for name in sources}
    texts: dict[str, list[tuple[int, ...]]] = {name: [] for name in sources}
    with (
        local_server(spec, arguments=["--threads", "1"]) as server,
        Relay((server.rpartition(":")[0], int(server.rpartition(":")[2])), delay=options.delay / 2e3) as relay,
    ):
        host, port = relay.address
        with EdgeClient(f"{host}:{port}", ModelChoice(spec, threads=1)) as client:
            for name, source in sources.items():
                ahead = name.endswith("ahead")
                chats = Chats(client, options.cut, seats=1, drafts=source, drafts_ahead=ahead, most_drafted=16)
                with closing(chats):
                    chats.write(_task(chats, "Hello", 4), lambda chosen: False)  # plans
                    for prompt in itertools.chain(*PROMPTS.values()):
                        began = time.perf_counter()
                        written = chats.write(_task(chats, prompt, options.new), lambda chosen: False)
                        rates[name].append(len(written.ids) / (time.perf_counter() - began))
                        texts[name].append(written.ids)
                        print(name, f"{rates[name][-1]:.1f} tokens/s", prompt[:40].replace("\n", " "), flush=True)
    found: dict[str, Any] = {"tokens_per_second": rates}
    for name in list(sources)[1:]:
        gains = [fast / slow for fast, slow in zip(rates[name], rates["none"], strict=True)]
        same = sum(one == other for one, other in zip(texts[name], texts["none"], strict=True))
        found[name] = {"median": statistics.median(gains), "gains": gains, "identical": same, "of": len(gains)}
    return found


def _task(chats: Chats, text: str, tokens: int) -> TextTask:
    words = chats.words
    ids = words.chat([{"role": "user", "content": text}]) if words.has_template else words.encode(text)
    return TextTask(tuple(ids), tokens, Sampling(temperature=0))


def sessions(options: argparse.Namespace, spec: str) -> dict[str, Any]:
    """Tokens a second of 1, 8 and 32 texts at once on one server, which may compute steps together."""
    found: dict[str, Any] = {}
    prompts = list(itertools.chain(*PROMPTS.values()))
    many = ConnectionOptions(max_in_flight=32)
    with local_server(spec) as server, EdgeClient(server, spec, connection=many) as client:
        for count in (1, 8, 32):
            with (
                closing(Chats(client, options.cut, seats=count, exact=False)) as chats,
                ThreadPoolExecutor(count) as pool,
            ):
                tasks = [_task(chats, prompts[at % len(prompts)], options.new) for at in range(count)]
                for new in (4, None):  # the first to a steady state
                    began = time.perf_counter()
                    asked = [task if new is None else replace(task, most=new) for task in tasks]
                    done = list(pool.map(lambda task: chats.write(task, lambda chosen: False), asked))
                    took = time.perf_counter() - began
            found[str(count)] = sum(len(one.ids) for one in done) / took
            print(f"{count} sessions: {found[str(count)]:.1f} tokens/s", flush=True)
    whole: Any = load_spec(spec).load_model("cpu")
    rows = [torch.tensor(task.prompt) for task in tasks]
    with torch.no_grad():
        for count in (1, 8, 32):
            try:
                found[f"generate_batch {count}"] = _batched(whole, [row.tolist() for row in rows[:count]], options.new)
            except Exception as error:  # what this release takes on this machine
                found[f"generate_batch {count}"] = f"{type(error).__name__}: {error}"[:200]
            print(f"generate_batch of {count}: {found[f'generate_batch {count}']}", flush=True)
    return found


def _batched(model: Any, prompts: list[list[int]], new: int) -> float:
    """Tokens a second of transformers' own continuous batching in one process."""
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens, config.do_sample = new, False
    model.generate_batch(inputs=prompts[:1], generation_config=config, progress_bar=False)
    began = time.perf_counter()
    made = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    took = time.perf_counter() - began
    if wrong := [one.error for one in made.values() if one.error]:
        raise RuntimeError(wrong[0])
    return sum(len(one.generated_tokens) for one in made.values()) / took


def divided(options: argparse.Namespace, spec: str) -> dict[str, Any]:
    """Greedy texts of a whole server and of one with `--tensor-parallel`: tokens against the whole model's,
    milliseconds a token, and what each process takes beyond one with a model of next to no weights.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        tiny = _saved(model(16), folder / "tiny")
        large = options.model or str(_saved(model(), folder / "large"))
        found: dict[str, Any] = {"processes": options.processes}
        for processes in (1, options.processes):
            base = _texts(tiny, "model.layers.2", options, processes)[1]
            wrong, taken, seconds = _texts(large, options.cut, options, processes)
            beyond = [(one - two) / 2**20 for one, two in zip(taken, base, strict=True)]
            found[str(processes)] = {"other texts": wrong, "ms a token": 1e3 * seconds, "MiB beyond the base": beyond}
            print(processes, found[str(processes)], flush=True)
        whole: Any = load_spec(large).load_model("cpu")
        found["MiB of weights"] = sum(one.nbytes for one in whole.parameters()) / 2**20
    return found


def _saved(made: Any, folder: Path) -> str:
    """A spec of a model in a folder."""
    made.save_pretrained(folder)
    path = folder.with_suffix(".toml")
    path.write_text(
        f'id = "{folder.name}"\nfactory = "transformers:AutoModelForCausalLM.from_pretrained"\n'
        f'[factory_kwargs]\npretrained_model_name_or_path = "{folder}"\n'
    )
    return str(path)


def _texts(spec: str, cut: str, options: argparse.Namespace, processes: int) -> tuple[int, list[int], float]:
    """How many of ten texts are not the whole model's; bytes of each process that computes; seconds a token."""
    words = ["--threads", "1", "--worker-processes", "--tensor-parallel", str(processes)]
    own = psutil.Process()
    before = set(own.children(recursive=True))
    with local_server(spec, arguments=words) as server, EdgeClient(server, ModelChoice(spec, threads=1)) as client:
        dice, wrong, took = torch.Generator().manual_seed(0), 0, []
        whole: Any = client.wrapped.model
        with SplitGenerator(client, cut) as split:
            for _ in range(10):
                ids = torch.randint(5, 300, (1, 40), generator=dice)
                asked: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
                asked |= {"max_new_tokens": options.new, "min_new_tokens": options.new}
                began = time.perf_counter()
                found = split.generate(**asked)
                took.append((time.perf_counter() - began) / options.new)
                wrong += not torch.equal(found, whole.generate(**asked))
        made = set(own.children(recursive=True)) - before
        computing = [
            one for one in made if any("processes.worker" in word or "spawn_main" in word for word in one.cmdline())
        ]
        taken = sorted((one.memory_info().rss for one in computing), reverse=True)
    return wrong, taken, statistics.median(took)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m studies.serving", description=(__doc__ or "").splitlines()[0])
    measures = {"first-token": first_tokens, "drafts": drafts, "sessions": sessions, "divided": divided}
    parser.add_argument("what", nargs="?", choices=tuple(measures), default="first-token")
    parser.add_argument("--model")
    parser.add_argument("--cut", default="model.layers.2")
    parser.add_argument("--tokens", type=int, default=1000, help="of a common beginning")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--new", type=int, default=64, help="tokens of each text, for drafts and sessions")
    parser.add_argument("--delay", type=float, default=40.0, help="of a round trip in milliseconds, for drafts")
    parser.add_argument("--processes", type=int, default=2, help="for divided")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    measure = measures[options.what]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "speaker.toml"
        path.write_text(SPEC)
        found = measure(options, options.model or str(path))
    found = {"model": options.model or "8 blocks, 512 wide", "tokens": options.tokens, **found}
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
