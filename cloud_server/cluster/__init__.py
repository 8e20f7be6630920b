"""``cloud-server --on ray``: one server on several machines; Ray Serve starts, watches, scales and replaces replicas.

command      the command: starts or joins Ray, deploys, and drains at the end
application  what Ray Serve deploys: models, fronts, and how many of each
passport     what a front says of a caller to a replica
census       the replicas that a front knows of
front        the process that clients connect to
relay        passes a client's calls on to its replica, unchanged
replica      one replica of a model: a core behind a private port

Only command and application know Ray. May import what a server is made of: core, transport, telemetry.
"""
