"""Frames of a session and their bytes: those that carry payloads by hand, all others by the generated code."""

from __future__ import annotations

from protos import chunks, headed
from protos.chunks import ChunkFrame
from protos.headed import HeadedReply, HeadedRequest
from protos.isthmus.v1 import split_pb2

ClientFrame = split_pb2.ClientFrame | HeadedRequest | ChunkFrame
"""What an edge sends."""
ServerFrame = split_pb2.ServerFrame | HeadedReply | ChunkFrame
"""What it hears."""


def serialize_client_frame(frame: ClientFrame) -> bytes:
    """A ClientFrame's bytes: the request serializer of the session's channel."""
    if isinstance(frame, ChunkFrame):
        return chunks.serialize(frame, chunks.CLIENT)
    return headed.serialize_request(frame) if isinstance(frame, HeadedRequest) else frame.SerializeToString()


def serialize_server_frame(frame: ServerFrame) -> bytes:
    """A ServerFrame's bytes: the response serializer of the session's handler."""
    if isinstance(frame, ChunkFrame):
        return chunks.serialize(frame, chunks.SERVER)
    return headed.serialize_reply(frame) if isinstance(frame, HeadedReply) else frame.SerializeToString()


def parse_client_frame(data: bytes) -> ClientFrame:
    """A ClientFrame from its bytes, every chunk as a ChunkFrame. Raises DecodeError for bytes that are none."""
    if (quick := chunks.parse(data, chunks.CLIENT) or headed.parse_request(data)) is not None:
        return quick
    frame = split_pb2.ClientFrame.FromString(data)
    return chunks.view(frame.chunk) if frame.WhichOneof("frame") == "chunk" else frame


def parse_server_frame(data: bytes) -> ServerFrame:
    """A ServerFrame from its bytes, every chunk as a ChunkFrame. Raises DecodeError for bytes that are none."""
    if (quick := chunks.parse(data, chunks.SERVER) or headed.parse_reply(data)) is not None:
        return quick
    frame = split_pb2.ServerFrame.FromString(data)
    return chunks.view(frame.chunk) if frame.WhichOneof("frame") == "chunk" else frame
