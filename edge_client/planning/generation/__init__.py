"""Which cut is best for split generation: what a token, the first one, and a whole reply take, from numbers alone.

predict   profiles, link, workload -> candidates; the best of them
measured  all that was measured, kept as JSON
"""
