"""Real senders of pictures before a real `edge-client run`: GStreamer, an IP camera's HTTP, V4L2. See docs/sources.md.

senders   processes that send: GStreamer pipelines, an RTSP server with a password, HTTP
cases     one run of the command line before each, and what must come of it
v4l2      the same in a virtual machine whose kernel has a camera (vivid)
"""
