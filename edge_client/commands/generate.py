"""``edge-client generate``: a text continued by a language model whose first layers are here."""

from __future__ import annotations

import argparse
import sys

import torch

from edge_client.commands import common
from edge_client.commands.common import check_json_target, write_json
from edge_client.commands.speaking import draw, figures, how, speaker, tell
from edge_client.generation import SplitGenerator, TextStream, Words
from edge_client.screen.flow import Flow
from shared_hooks.errors import SpecError


def main(options: argparse.Namespace) -> int:
    """Write the text to standard output and what it took to standard error; exit status."""
    check_json_target(options.json)
    if options.beams > 1 and options.lookup is not None:
        raise SpecError("--lookup drafts one sequence, and --beams searches among several: one of them")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with speaker(options) as (generator, words):
        text, ids = _written(options, generator, words, prompt)
        summary = generator.summary
        assert summary is not None
        tell(figures(summary))
        if options.json:
            said = {
                "model": generator.client.model_id,
                "server": generator.client.server,
                "cut": generator.cut,
                "prompt": prompt,
                "text": text,
                "token_ids": ids,
                "unlike": list(generator.client.unlike),
                "exit_status": common.OK,
                **summary.as_dict(),
            }
            write_json(said, options.json, options.stdout)
    return common.OK


def _written(
    options: argparse.Namespace, generator: SplitGenerator, words: Words, prompt: str
) -> tuple[str, list[int]]:
    """Text and token ids that came after the prompt, shown."""
    asked = words.encode(prompt)
    if not asked:
        raise SpecError("--prompt: the tokenizer makes no token of it, so there is nothing to go on from")
    flow = Flow(sys.stdout)
    streams = options.beams == 1 and not options.no_stream
    stream = TextStream(words, flow.write)
    draw(options)
    ids = torch.tensor([asked], device=generator.client.device)
    try:
        output = generator.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=options.beams,
            pad_token_id=words.pad,
            streamer=stream if streams else None,
            **how(options),
        )
        assert generator.summary is not None
        made = output[0].tolist()[-generator.summary.tokens :] if generator.summary.tokens else []
        text = words.decode(made)
        if not streams:
            flow.write(text)
    finally:
        flow.end()
    return text, made
