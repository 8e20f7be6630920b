"""`edge-client serve`, measured: how soon the first token of a prompt comes whose beginning another chat has read.

    python -m studies.serving [--model SPEC --cut CUT] [--tokens 1000] [--json FILE]

Without a model a Llama with random weights, 8 blocks 512 wide. Prompts are token ids, drawn; each pair begins with its
own; times are those of the first event of a stream.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from edge_client import EdgeClient, local_server
from edge_client.serving.app import Endpoint
from edge_client.serving.chats import Chats

ROOT = Path(__file__).parents[1]


def model() -> Any:
    """See the module."""
    import transformers

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
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


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m studies.serving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--cut", default="model.layers.2")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    dice = random.Random(0)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "speaker.toml"
        path.write_text(SPEC)
        spec = options.model or str(path)
        with local_server(spec) as server, EdgeClient(server, spec) as client:
            chats = Chats(client, options.cut, seats=2)
            with Endpoint(chats, "0") as endpoint:
                rows = []
                for _ in range(options.pairs + 1):
                    common = [dice.randrange(5, 300) for _ in range(options.tokens)]
                    pair = [[*common, *(dice.randrange(5, 300) for _ in range(12))] for _ in range(2)]
                    rows.append([first_token(endpoint.url, endpoint.model, ids) for ids in pair])
            chats.close()
    rows = rows[1:]  # without the first pair, which plans
    read, known = (statistics.median(row[at][0] for row in rows) for at in (0, 1))
    found = {
        "model": options.model or "8 blocks, 512 wide",
        "tokens": options.tokens,
        "first_token_s": read,
        "first_token_known_s": known,
        "ratio": known / read,
        "kept": min(row[1][1] for row in rows),
    }
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
