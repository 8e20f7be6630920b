"""``cloud-server --on ray``: one server on several machines; Ray Serve starts, watches, scales and replaces replicas.

command      the command: Ray started or joined, everything up, drained at the end
application  what Ray Serve is given: models, fronts, how many of each; for ``serve deploy``, too
allowed      what cannot be had there, refused by name
finder       where a session's replica is, asked of Ray Serve
scaling      how many replicas the work there is wants
replica      one replica: a core behind a private port
front        the process that clients connect to
relay        a client's calls handed on to its replica, as they come
proxied_calls  the calls that are handed on: how many may be, who is to go, who is under way
inference_relay  the Open Inference Protocol's calls, likewise
census       the replicas that a front knows of
passport     what a front tells a replica of a caller
ray_port     a port of Ray Serve's that nobody needs, closed
private_tls  the way between them, encrypted with keys that nobody made by hand
metrics      the replicas' metrics on one page

Only command, application, finder, ray_port and scaling know Ray. May import what a server is made of: core, transport,
telemetry.
"""
