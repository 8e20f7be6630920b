"""Many requests and many reconnects: does anything grow? ``make soak``.

asker   the client's process: every answer compared bit for bit
slope   of a line through readings, with an interval
watch   memory, descriptors and threads of processes
run     a soak, and what came of it
"""
