"""Which cut is best for split generation: what a token, the first one, and a whole reply take, from numbers alone.

workload  what is to be generated, and how
overhead  what a split step takes beside its blocks
fitting   the server's profile and the overhead, from a few real steps
predict   profiles, link, workload -> candidates
measured  all that was measured, kept as JSON
choose    the best of them
moving    whether a running session should move its cut
"""
