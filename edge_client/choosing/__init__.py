"""Which codec every tensor of a request travels with, where the user leaves that open: ``codec="auto"``.

pick      the choice, from numbers alone
belief    the link, at a cut that stays
speeds    what codecs take on this machine, and make of the tensors of a cut
watched   a codec that tells how long it took
chooser   `Chooser`: of one client; it measures, picks, learns from answers
beginning made of what a client says

May import planning; of the engine codecs and crossings.
"""
