"""Floods of HTTP/2 frames at a server's port, by a stranger who has nothing but a socket.

frames   bytes of frames, and connections that send them
floods   one function a flood
beside   one flood on a fresh server process, beside an honest client
"""
