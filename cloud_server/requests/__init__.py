"""Requests on their way through a server.

request        one of them, and its payload
batched        a request as part of a batch
request_table  which requests there are, and how each ends
answers        what they are answered with
store          ... kept until the client has it
replies        results and errors as frames
outlet         what a request asks of its stream

May import decoding, models, wire, limits.
"""

from cloud_server.requests.answers import Answer
from cloud_server.requests.outlet import Outlet
from cloud_server.requests.request import Request, State, about
from cloud_server.requests.request_table import RequestTable

__all__ = [
    "Answer",
    "Outlet",
    "Request",
    "RequestTable",
    "State",
    "about",
]
