"""``cloud-server --on ray``: one server on several machines; Ray Serve starts, watches, scales and replaces replicas.

command      the command: Ray started or joined, everything up, drained at the end
application  what Ray Serve is given: models, fronts, how many of each
passport     what a front tells a replica of a caller
census       the replicas that a front knows of
front        the process that clients connect to
relay        a client's calls handed on to its replica, as they come
replica      one replica of a model: a core behind a private port

Only command and application know Ray. May import what a server is made of: core, transport, telemetry.
"""
