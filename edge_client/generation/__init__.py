"""Generation cut in two: the first layers and their caches here, the rest and theirs in a session at the server.

generator     `SplitGenerator`, `split_model`: generate() of transformers, split
clock         when tokens come
summary       what a generation took
words         text to token ids and back; text as it comes
conversation  turns of a chat, with the state kept between them
drafting      several tokens a round trip
survey        a few split steps, measured: what a plan of a generation is made of
link          steps of decoding sessions over a client's connection
"""

from edge_client.generation.conversation import Conversation, Turn
from edge_client.generation.generator import SplitGenerator, split_model
from edge_client.generation.link import SessionLink
from edge_client.generation.summary import Summary
from edge_client.generation.words import TextStream, Words

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
