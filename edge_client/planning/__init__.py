"""Which cut is best, worked out from numbers alone, without any connection.

candidate    one way to run a request, and its prediction
predict      profiles, link, load -> candidates
objective    what "best" means
explain      a decision as text
link         what a link carries
link_estimate  ... now, from real transfers
tracker      a number estimated from noisy observations
speed        how fast a link is, with its spread
calibration  predictions corrected by measurements
codecs       which codecs may be used where, for the loss that is allowed
loss_table   what codecs cost in answers at every cut, as it was calibrated
partitioners other ways to choose
generation   the same for models that are called step by step

May import modes, load; of the engine profiles, readings and codecs.
"""
