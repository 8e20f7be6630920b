"""``python -m studies.generation.codecs``: what codecs of hidden states cost in perplexity, and what they save.

A small Llama learns the bytes of the project's own pages, seeded, for so many minutes, and is judged on pages that it
has not seen: whole, and cut after its first, middle and last but one block with the hidden states coded. Bytes are
those of a real step of a model of width 4096 in bfloat16, whose hidden states are random.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from shared_hooks.generation import DecodingTail, InProcess, SplitForward
from shared_hooks.generation.hidden import CODECS

ROOT = Path(__file__).parents[2]
LENGTH, ROWS, BLOCKS, WIDTH = 192, 16, 6, 192
HELD_OUT = 8
"""Every such page is held out from learning."""
WIDE = 4096


def pages() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to learn, and bytes to judge by."""
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md"), *ROOT.glob("*.md")])
    learned = b"".join(file.read_bytes() for number, file in enumerate(files) if number % HELD_OUT)
    judged = b"".join(file.read_bytes() for number, file in enumerate(files) if not number % HELD_OUT)
    return torch.tensor(list(learned)), torch.tensor(list(judged))


def model_of(width: int, blocks: int, words: int, heads: int) -> Any:
    """A Llama with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 16 * 16,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config)


def taught(model: Any, text: torch.Tensor, minutes: float) -> int:
    """Steps taken."""
    dice = torch.Generator().manual_seed(1)
    rate = 1e-3
    teacher = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    until, began, steps = time.monotonic() + 60 * minutes, time.monotonic(), 0
    model.train()
    while time.monotonic() < until:
        starts = torch.randint(0, len(text) - LENGTH, (ROWS,), generator=dice)
        rows = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        done = (time.monotonic() - began) / (60 * minutes)
        for group in teacher.param_groups:
            group["lr"] = rate * min(1.0, steps / 50) * (0.5 + 0.5 * math.cos(math.pi * min(done, 1.0)))
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        teacher.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        teacher.step()
        steps += 1
    model.eval()
    return steps


def judged(model: Any, rows: torch.Tensor, whole: torch.Tensor | None) -> tuple[float, float, torch.Tensor]:
    """Perplexity a byte, agreement of the likeliest byte with the ``whole`` model's, and these bytes."""
    loss, likeliest = 0.0, []
    with torch.no_grad():
        for part in rows.split(ROWS):
            logits = model(input_ids=part, use_cache=False).logits.float()
            flat = logits[:, :-1].reshape(-1, logits.shape[-1])
            loss += float(torch.nn.functional.cross_entropy(flat, part[:, 1:].reshape(-1), reduction="sum"))
            likeliest.append(logits.argmax(-1))
    found = torch.cat(likeliest)
    same = 1.0 if whole is None else float((found == whole).float().mean())
    return math.exp(loss / (rows.shape[0] * (rows.shape[1] - 1))), same, found


def bytes_up(codec: str | None) -> int:
    """Return the bytes of one decode step at width 4096."""
    cut = "model.layers.0"
    here = model_of(WIDE, 2, 64, 32).to(torch.bfloat16).eval()
    with SplitForward(here, cut, InProcess(DecodingTail(copy.deepcopy(here), cut)), codec=codec) as split:
        here.generate(torch.arange(5, 13)[None], max_new_tokens=6, do_sample=False, pad_token_id=0)
    return split.records[-1].bytes_up


def main() -> int:
    """The exit status is 0, whatever is measured."""
    parser = argparse.ArgumentParser(prog="python -m studies.generation.codecs", description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="of learning")
    parser.add_argument("--rows", type=int, default=96, help=f"of {LENGTH} bytes, to judge by")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    learned, unseen = pages()
    model = model_of(WIDTH, BLOCKS, 256, 6)
    steps = taught(model, learned, options.minutes)
    rows = unseen[: len(unseen) // LENGTH * LENGTH].reshape(-1, LENGTH)
    rows = rows[:: max(1, len(rows) // options.rows)][: options.rows]
    whole, _, words = judged(model, rows, None)
    print(f"{steps} steps; perplexity of a byte {whole:.4f}")
    sizes = {codec: bytes_up(codec) for codec in (None, *CODECS)}
    found = []
    for number in (0, BLOCKS // 2 - 1, BLOCKS - 2):
        cut = f"model.layers.{number}"
        tail = DecodingTail(copy.deepcopy(model), cut)
        for codec in CODECS:
            with SplitForward(model, cut, InProcess(tail), codec=codec):
                perplexity, same, _ = judged(model, rows, words)
            more = 100 * (perplexity / whole - 1)
            found.append(
                {"cut": cut, "codec": codec, "more_percent": more, "same": same, "bytes_up_4096": sizes[codec]}
            )
            print(
                f"{cut}  {codec}  perplexity {more:+.3f} %  same byte {100 * same:.2f} %  {sizes[codec]} bytes a step"
            )
    reported = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m studies.generation.codecs", *sys.argv[1:]]),
        "steps": steps,
        "perplexity": whole,
        "bytes_up_raw_4096": sizes[None],
        "rows": found,
    }
    if options.json:
        options.json.write_text(json.dumps(reported, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
