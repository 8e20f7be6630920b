"""One hostile client beside three honest ones: what it can use up, and which bound it meets. See SECURITY.md.

models      what is served besides the shipped model
material    honest requests, recorded, so that the hostile process needs no engine
stranger    the hostile client's means: valid messages, by the protocol's definition alone
cases       what it does with them: a small function each, registered by name
hostile     its process
honest      an honest client's process: the real `EdgeClient`, every answer compared bit for bit
processes   starts, measures and ends processes
limits      what the server may take by its limits
trial       one case on a fresh server: without, with, and after the attack
overload    demand beyond what the server can do; fifty clients of mixed sizes
memory      one server full to its limits (`filled`), and what is resident
filled      ... that server
table       what came of it, for people
"""
