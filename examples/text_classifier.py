"""A model of transformers, split inside its encoder: a tokenizer's batch goes in as it is.

The model is made from a small configuration and has learned nothing: what it says means nothing. A real one is two
lines of text_classifier.toml (docs/jobs/transformers.md), and everything else stays.

cloud-server --model examples/text_classifier.toml &
python examples/text_classifier.py --server 127.0.0.1:50051 "a good day"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from edge_client import EdgeClient

SPEC = Path(__file__).with_suffix(".toml")
WORDS = ["[PAD]", "[UNK]", *"a an the day film time was is not very good bad long short fine dull".split()]


def build() -> BertForSequenceClassification:
    """What text_classifier.toml names. Random weights, the same in every process (the spec's ``seed``)."""
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    return BertForSequenceClassification(config)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words of our own; a real model brings its own (``AutoTokenizer.from_pretrained``)."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--split", default="bert.encoder.layer.0.output.LayerNorm")
    parser.add_argument("texts", nargs="*", default=["a good day", "the film was very long"])
    options = parser.parse_args()
    words = tokenizer()
    with EdgeClient(options.server, str(SPEC), split=options.split) as client:
        for text in options.texts:
            answer = client.infer(words(text, return_tensors="pt", return_token_type_ids=False))
            best = answer.result[0]
            print(f"{text!r}: {best.label} ({best.score:.2f}), {answer.bytes_up} bytes up")


if __name__ == "__main__":
    main()
