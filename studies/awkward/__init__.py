"""Models of the kinds that cutting gets wrong, written out one by one, each cut everywhere with a cold tail.

kinds   what they do, as a few lines of a forward
"""
