"""Generation cut in two: the first layers and their caches here, the rest and theirs in a session at the server.

link          steps of decoding sessions over a client's connection
generator     `SplitGenerator`, `split_model`: generate() of transformers, split
summary       when tokens came, and what a generation took
conversation  turns of a chat; text to token ids and back
heads         heads of several texts at once
drafting      several tokens a round trip
survey        a few split steps, measured: what a plan of a generation is made of
"""

from edge_client.generation.conversation import Conversation, TextStream, Turn, Words
from edge_client.generation.generator import SplitGenerator, split_model
from edge_client.generation.link import SessionLink
from edge_client.generation.summary import Summary

__all__ = [
    "Conversation",
    "SessionLink",
    "SplitGenerator",
    "Summary",
    "TextStream",
    "Turn",
    "Words",
    "split_model",
]
