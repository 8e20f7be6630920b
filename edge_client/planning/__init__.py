"""Which cut is best, worked out from numbers alone, without any connection.

mincut        the set of calls that takes the least, along branches
objective     ways to run a request, and what "best" means
predict       profiles, link, load -> candidates, corrected by measurements
explain       a decision as text
link          what a link carries, estimated from requests and probes
codecs        which codecs may be used where, for the loss that is allowed
leakage       what crosses gives away, and a bound on it
page          a plan as a page: the graph and its cut, every way
partitioners  other ways to choose
generation    the same for models that are called step by step

May import modes, call; of the engine profiles, readings and codecs.
"""
