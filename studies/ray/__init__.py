"""Behind Ray Serve, on a cluster of several nodes on loopback: what it costs, what replicas give, what a death takes.

cluster      the nodes, and ``cloud-server`` on them or as one plain process
model        a tail that sleeps, and what crosses of any size
latency      the same requests at one plain process, behind a front, and behind Ray Serve's own proxy
throughput   1, 2 and 4 replicas against one process
killed       a replica, a front, a node; an update; under load
proxy        Ray Serve's own gRPC proxy with our service, as it was tried
table        the results as they stand in the docs
"""
