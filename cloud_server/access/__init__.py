"""Who calls, and what one may.

register    who is let in, now
identities  tokens and certificates, who they belong to, and what each may do; ``cloud-server token``
tls         the server's certificate and key, read again when they change

May import nothing of the server but limits.
"""

from cloud_server.access.identities import (
    EVERYTHING,
    Caller,
    Credentials,
    Policy,
    granted,
    names_in,
    passport_in,
    token_in,
)
from cloud_server.access.register import Quotas, Register
from cloud_server.access.tls import Certificates, State, Tls, state_of

__all__ = [
    "EVERYTHING",
    "Caller",
    "Certificates",
    "Credentials",
    "Policy",
    "Quotas",
    "Register",
    "State",
    "Tls",
    "granted",
    "names_in",
    "passport_in",
    "state_of",
    "token_in",
]
