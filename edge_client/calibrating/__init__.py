"""Measure the accuracy that every codec costs at every cut, on the user's own inputs: ``edge-client calibrate``.

inputs   the inputs, and their labels; confidence bounds
outputs  an output's kind, and the comparison of outputs
study    head, encode, decode, tail: over all inputs
"""
