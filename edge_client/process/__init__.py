"""A server that the client starts.

local_server   a cloud server on loopback, for as long as it is needed

May import nothing of the client.
"""
