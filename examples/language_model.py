"""A language model, split: prompt, tokenizer and first layers here, the other layers on a server.

The model is made from a small configuration and has learned nothing: what it says means nothing. A real one is four
lines of language_model.toml, and everything else stays (docs/generation.md).

cloud-server --model examples/language_model.toml &
python examples/language_model.py --server 127.0.0.1:50051 "the first layers"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from edge_client import EdgeClient
from edge_client.generation import SplitGenerator, TextStream, Words

SPEC = Path(__file__).with_suffix(".toml")
WORDS = 384


def build() -> LlamaForCausalLM:
    """What language_model.toml names. Random weights, the same in every process (the spec's ``seed``)."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    """Pairs of letters that are frequent in this file; a real model brings its own (a folder, in the spec)."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(n))[0][0] for n in range(32, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--cut", default="model.layers.2")
    parser.add_argument("text", nargs="?", default="the first layers run here")
    options = parser.parse_args()
    with EdgeClient(options.server, str(SPEC)) as client, SplitGenerator(client, options.cut) as generator:
        words = Words.of(client.spec)
        inputs = words.tokenizer(options.text, return_tensors="pt", return_token_type_ids=False)
        stream = TextStream(words, lambda text: print(text, end="", flush=True))
        generator.generate(**inputs, max_new_tokens=24, do_sample=True, top_k=40, streamer=stream)
        print(f"\n{generator.summary}")


if __name__ == "__main__":
    main()
