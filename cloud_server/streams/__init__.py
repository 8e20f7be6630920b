"""A client's streams: what it may send and when, and what is sent back.

session    one stream, and its uploads
handshake  whether both sides hold the same model
probe      a stream that measures the link; the pace of an account's frames

May import requests, decoding, models, wire, limits.
"""

from cloud_server.streams.handshake import CrossingCache, check_form
from cloud_server.streams.probe import AccountPace, ProbeStream
from cloud_server.streams.session import InFrame, StreamSession

__all__ = [
    "AccountPace",
    "CrossingCache",
    "InFrame",
    "ProbeStream",
    "StreamSession",
    "check_form",
]
