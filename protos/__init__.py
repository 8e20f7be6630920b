"""The wire format and the code generated from it; `python -m protos.generate` makes that code again.
frames      Frames of a session and their bytes: those that carry payloads by hand, all others by the generated code"""

from typing import Final

PROTOCOL_VERSION: Final = 3
"""Both sides say theirs in the first frame; only equal ones talk."""

FACTS_WANTED: Final = "isthmus-facts-wanted"
"""In the trailing metadata of a stream that was refused: with `Hello.manifest` the refusal could say more."""
