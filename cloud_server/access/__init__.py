"""Who calls, and what one may.

register    who is let in, now
identities  tokens and certificates, who they belong to, and what each may do; ``cloud-server token``

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
from cloud_server.access.register import Certificates, Quotas, Register, State, Tls, state_of

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
