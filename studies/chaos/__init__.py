"""Real servers and clients under faults: what is lost, wrong or computed twice, and for how long nobody is served.

model     the model: little work, frontiers from 3 kB to 3.3 MB
served    the server's process
counting  a hook in the server: which requests were really computed
asking    a client's process: asks all the time and compares every answer bit for bit
crowd     the clients' processes, and what they have written down
faults    what is done to them
findings  what it came to, by kind of fault: a table and JSON

`python -m studies.chaos` (``make chaos``) runs it.
"""
