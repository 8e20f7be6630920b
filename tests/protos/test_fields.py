"""One field is found as the generated code finds it, and what is no message is refused."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import frames
from protos.inference import inference_pb2 as pb


def name_of(data: bytes, most: int = 9) -> str:
    return frames.text(data, pb.ModelInferRequest.MODEL_NAME_FIELD_NUMBER, most)


def request(name: str) -> bytes:
    made = pb.ModelInferRequest(model_name=name, id="i", raw_input_contents=[b"x" * 300, b""])
    made.inputs.add(name="x", shape=[2, 8])
    return made.SerializeToString()


@settings(max_examples=20)
@given(st.text(max_size=200))
def test_wherever_it_stands(name: str) -> None:
    whole, alone = request(name), pb.ModelInferRequest(model_name=name).SerializeToString()
    assert name_of(whole) == name_of(request("") + alone) == name
    assert name_of(request("another") + alone) == (name or "another")  # of two the last
    assert name_of(b"\x98\x06\x01" + b"\xa1\x06" + bytes(8) + b"\xa5\x06" + bytes(4) + whole) == name  # unknown ones


@settings(max_examples=50)
@given(st.binary(max_size=40))
def test_parser_agrees_with_generated_code_or_refuses(data: bytes) -> None:
    try:
        found = name_of(data)
    except DecodeError:
        return
    try:
        assert found == pb.ModelInferRequest.FromString(data).model_name
    except DecodeError:
        pass  # in another field, which a replica reads


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (request("n")[:-3], "middle"),
        (b"\x0a\x01\xff", "utf-8"),
        (b"\x0b", "kind 3"),
        (b"\x0a", "index"),
        (b"\x0a\x00" * 10, "more than 9 fields"),
    ],
    ids=["cut off", "no text", "a group", "no length", "too many"],
)
def test_invalid_message_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(DecodeError, match=says):
        name_of(data)
