"""Faults put into the code that guards memory, state, identity, bounds and numbers: does `make test` notice?

faults   the code that is changed, the changes, and a sample of them
covering which tests run a line, and how long each takes
trial    one fault at a time in a copy of the project

Needs the extra ``mutation`` (cosmic-ray, pytest-cov).
"""
