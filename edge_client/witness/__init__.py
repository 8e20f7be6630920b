"""Answers also computed whole here, and compared.

witness      which requests, and what came of it
comparison   how much two outputs differ

May import transport, screen, call.
"""

from edge_client.witness.witness import INPUT, Kept, Witness, Witnesses, check_share

__all__ = [
    "INPUT",
    "Kept",
    "Witness",
    "Witnesses",
    "check_share",
]
