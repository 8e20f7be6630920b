"""Requests in progress on a server.

request        one request: its payload, stream and answer
request_table  all requests, how each ends, and answers kept until the client has them

May import decoding, models, wire, limits.
"""

from cloud_server.requests.request import Outlet, Request, RequestState, ServerAnswer, about
from cloud_server.requests.request_table import RequestTable

__all__ = [
    "Outlet",
    "Request",
    "RequestState",
    "RequestTable",
    "ServerAnswer",
    "about",
]
