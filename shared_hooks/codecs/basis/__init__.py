"""A basis for the channels of one tensor of one cut, learnt from a user's inputs: few numbers carry most of it.

symbols   small integers <-> bytes
cosine    the spatial half: the discrete cosine transform of a feature map
book      `Book`: what was learnt; it travels in the description of the cut
codec     `Basis`: a tensor <-> symbols <-> bytes, by a book
frames    `Frames`: as the difference to an earlier one
ring      what is kept of them
learning  tensors of a calibration -> a book

May import codec, grain.
"""

from shared_hooks.codecs.basis.book import MAX_BOOK_BYTES, MAX_COEFFICIENTS, Book
from shared_hooks.codecs.basis.codec import Basis
from shared_hooks.codecs.basis.frames import KEY, Frames, References
from shared_hooks.codecs.basis.learning import learn
from shared_hooks.codecs.basis.ring import Ring

__all__ = ["KEY", "MAX_BOOK_BYTES", "MAX_COEFFICIENTS", "Basis", "Book", "Frames", "References", "Ring", "learn"]
