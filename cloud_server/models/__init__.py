"""The served models.

engine         what the core needs of a model, and an answer as bytes
served_model   an engine whose model is in this process
admission      what a request announces, checked without the model
decoding       decoding sessions in this process
batching       requests of several clients as one batch
profiles       the tail of every cut, measured on request

May import entries, limits.
"""

from cloud_server.models.admission import check_open
from cloud_server.models.engine import (
    FILE,
    Batching,
    BatchKey,
    Begun,
    BegunTail,
    Computed,
    Engine,
    EngineSession,
    FileRead,
    Following,
    Identity,
    Leave,
    PartEnd,
    Progress,
    Residence,
    inexact,
    join_reply,
    leave_out,
    newest_first,
    room_for,
    version_of,
)
from cloud_server.models.profiles import Profiles
from cloud_server.models.served_model import ServedModel

__all__ = [
    "FILE",
    "BatchKey",
    "Batching",
    "Begun",
    "BegunTail",
    "Computed",
    "Engine",
    "EngineSession",
    "FileRead",
    "Following",
    "Identity",
    "Leave",
    "PartEnd",
    "Profiles",
    "Progress",
    "Residence",
    "ServedModel",
    "check_open",
    "inexact",
    "join_reply",
    "leave_out",
    "newest_first",
    "room_for",
    "version_of",
]
