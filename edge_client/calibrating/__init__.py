"""What every codec costs in answers, at every cut, on the user's own inputs: ``edge-client calibrate``.

inputs   the inputs, and their labels
outputs  which kind an output is of, and how far one is from another
study    head, encode, decode, tail: over all inputs
"""
