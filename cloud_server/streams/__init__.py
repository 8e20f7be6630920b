"""A client's streams: what it may send and when, and what goes back.

session     one stream
uploads     requests that arrive on it
area        a client's memory on this machine, read
hub         what a stream needs from the server
handshake   do both sides hold the same model?
crossings   descriptions of cuts, by digest
pace        what taking an account's frames may cost
probe       a stream that measures the link

May import requests, decoding, models, wire, limits.
"""

from cloud_server.streams.crossings import CrossingCache
from cloud_server.streams.handshake import check_form
from cloud_server.streams.pace import Pace
from cloud_server.streams.probe import Probe
from cloud_server.streams.session import InFrame, StreamSession

__all__ = [
    "CrossingCache",
    "InFrame",
    "Pace",
    "Probe",
    "StreamSession",
    "check_form",
]
