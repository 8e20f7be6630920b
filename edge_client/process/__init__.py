"""A server that the client starts.

local_server   a cloud server on loopback, for as long as it is needed
orphans        children of a process that is killed

May import nothing of the client.
"""
