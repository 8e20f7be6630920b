"""A basis for the channels of one tensor of one cut, learnt from a user's inputs: few numbers carry most of it.

book   `Book`: what was learnt; it travels in the description of the cut
codec  `Basis`: a tensor <-> symbols <-> bytes; `Frames`: as the difference to an earlier one

May import codec, grain.
"""

from shared_hooks.codecs.basis.book import MAX_BOOK_BYTES, MAX_COEFFICIENTS, Book, Ring, learn
from shared_hooks.codecs.basis.codec import KEY, Basis, Frames, References

__all__ = ["KEY", "MAX_BOOK_BYTES", "MAX_COEFFICIENTS", "Basis", "Book", "Frames", "References", "Ring", "learn"]
