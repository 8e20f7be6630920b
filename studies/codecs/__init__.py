"""What codecs make of frontiers, in bytes and in answers: ``python -m studies.codecs rates``; see docs/codecs.md.

rates   digits at its middle cuts by every codec: bytes, agreement, accuracy
"""
