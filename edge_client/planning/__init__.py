"""Which cut is best, worked out from numbers alone: it talks to nobody.

candidate    one way to run a request, and what is predicted of it
predict      profiles, link, load -> candidates
objective    what "best" means
explain      a decision as text
link         what a link carries
calibration  predictions put right by what was measured
partitioners other ways to choose

May import modes, load; of the engine profiles and readings.
"""
