"""Requests on their way through a server.

request        one of them, its payload, its stream, its answer
request_table  which requests there are, and how each ends; answers kept until the client has them

May import decoding, models, wire, limits.
"""

from cloud_server.requests.request import Answer, Outlet, Request, State, about
from cloud_server.requests.request_table import RequestTable

__all__ = [
    "Answer",
    "Outlet",
    "Request",
    "RequestTable",
    "State",
    "about",
]
