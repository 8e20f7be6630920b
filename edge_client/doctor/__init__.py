"""``edge-client doctor``: can this machine use that server, and do both sides agree?

reach   the way to it, step by step
agree   what it serves, and whether that is what this side has
"""
