"""Who calls, and what one may.

register     who is let in, now
identities   the file: tokens' hashes, and what each identity may
caller       one who calls, as the server knows it
credentials  what a caller shows
policy       what it may do, and how much of it
quota        what it has used of that in the last minute
tokens       long random words, and their hashes
tls          the server's certificate and key
watched      files that are read again
token_command  ``cloud-server token``

May import nothing of the server but limits.
"""

from cloud_server.access.caller import Caller
from cloud_server.access.credentials import Credentials, names_in, passport_in, token_in
from cloud_server.access.policy import EVERYTHING, Policy, granted
from cloud_server.access.quota import Quotas
from cloud_server.access.register import Register
from cloud_server.access.tls import Certificates, Tls
from cloud_server.access.watched import State, state_of

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
