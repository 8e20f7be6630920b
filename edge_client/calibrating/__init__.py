"""What every codec costs in answers, at every cut, on the user's own inputs: ``edge-client calibrate``.

intervals   how far the true value may lie from the one that was counted
outputs     which kind an output is of, and how far one is from another
inputs      the inputs, and their labels
tally       what is kept of one codec at one cut
learning    books for the codec "basis", and which of its steps is kept
study       head, encode, decode, tail: over all inputs
page        the table as a page: rate against loss, for every cut
"""
