"""Split generation: the first layers and their caches here, the rest and theirs in a session at the server.

link          steps of decoding sessions over a client's connection
generator     `SplitGenerator`, `split_model`: transformers' generate(), split
summary       when tokens came, and what a generation took
conversation  turns of a chat; text to token ids and back
heads         heads of several generations at once
drafting      several tokens per round trip
survey        a few measured split steps, from which a generation is planned
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
