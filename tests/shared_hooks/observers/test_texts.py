"""Tokens with text through the service: the spec names a tokenizer, the edge decodes what comes back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_client import EdgeClient
from edge_client.__main__ import main
from shared_hooks.errors import SpecError
from shared_hooks.models import load_spec
from shared_hooks.observers import TopTokens, named
from shared_hooks.observers.thumbnails import Texts
from tests.shared_hooks.observers.small import reader
from tests.shared_hooks.observers.test_hooks import server

CUT = "transformer.h.0.ln_2"
SPEC = """
id = "m"
factory = "tests.shared_hooks.observers.small:reader"
tokenizer = "{}"
[[example.args]]
shape = [1, 6]
dtype = "int64"
high = 40
"""


class Letters:
    """Knows the first so many ids."""

    known = 40

    def decode(self, ids: Sequence[int]) -> str:
        if ids[0] >= self.known:
            raise KeyError(ids[0])
        return f" {chr(97 + ids[0] % 26)}{ids[0] // 26}"


class Few(Letters):
    known = 0


class Converts:
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [f"t{one}" if one < 39 else None for one in ids]


def broken() -> Any:
    raise RuntimeError("no vocabulary")


def nothing() -> dict[str, str]:
    return {}


def spec(folder: Path, tokenizer: str) -> str:
    file = folder / "reader.toml"
    file.write_text(SPEC.format(tokenizer))
    return str(file)


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """A folder as ``transformers`` writes it: 40 words, "w0" to "w39"."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(40)}
    fast = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="w0").save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def observed(tokenizer: str, folder: Path, split: str = CUT) -> Any:
    ids = torch.arange(6)[None]
    with (
        server("m=tests.shared_hooks.observers.small:reader", "tokens", "debug") as address,  # it needs no tokenizer
        EdgeClient(address, spec(folder, tokenizer), split, observers=["tokens"]) as client,
    ):
        seen = client.infer(ids).observations["edge" if split == "edge-only" else "cloud"]["tokens"]
    with torch.no_grad():
        assert seen["records"][0]["ids"] == reader()(ids).logits[0, -1].topk(5).indices.tolist()
    return seen


@pytest.mark.parametrize("split", [CUT, "edge-only", "cloud-only"])
def test_ids_come_back_as_text(split: str, tmp_path: Path) -> None:
    seen = observed("tests.shared_hooks.observers.test_texts:Letters", tmp_path, split)
    (record,) = seen["records"]
    assert record["text"] == [Letters().decode([one]) for one in record["ids"]] and seen["notes"] == []


def test_a_local_folder_of_transformers_is_read(vocabulary: Path, tmp_path: Path) -> None:
    (record,) = observed("words", tmp_path)["records"]
    assert record["text"] == [f"w{one}" for one in record["ids"]]


def test_missing_tokenizer_feature_omits_the_text_only(tmp_path: Path) -> None:
    seen = observed("tests.shared_hooks.observers.test_texts:Few", tmp_path)
    (record,) = seen["records"]
    assert record["text"] == [] and len(record["ids"]) == 5
    assert seen["notes"] == [f"the tokenizer has no text for id {record['ids'][0]}: KeyError: {record['ids'][0]}"]
    assert seen["failures"] == 0


class Odd:
    """Each id is another way to fail, or not."""

    def decode(self, ids: Sequence[int]) -> Any:
        return {0: "fine", 1: None, 2: b"bytes", 3: "x" * 1000}[ids[0]]


@pytest.mark.parametrize(
    ("tokenizer", "ids", "text", "why"),
    [
        (Odd(), [0, 0], ("fine", "fine"), ""),
        (Odd(), [0, 1], (), "id 1: TypeError: it gave NoneType"),
        (Odd(), [2, 0], (), "id 2: TypeError: it gave bytes"),
        (Odd(), [3], ("x" * 200,), ""),
        (Odd(), [0, 9], (), "id 9: KeyError: 9"),
        (Converts(), [1, 2], ("t1", "t2"), ""),
        (Converts(), [1, 39], (), "id 39: LookupError: it is not in the vocabulary"),
        (Odd(), [], (), ""),
    ],
)
def test_all_ids_have_text_or_none_has(tokenizer: Any, ids: list[int], text: tuple[str, ...], why: str) -> None:
    found, said = Texts(tokenizer).of(ids)
    assert found == text and said.endswith(why) and bool(said) == bool(why)


def test_an_unknown_id_that_decodes_to_nothing_has_no_text(vocabulary: Path, tmp_path: Path) -> None:
    texts = Texts(load_spec(spec(tmp_path, "words")).load_tokenizer())
    assert texts.of([3]) == (("w3",), "")
    found, why = texts.of([3, 4000])
    assert found == () and "id 4000" in why


@pytest.mark.parametrize("ids", ["x", None, [1.5], [True], [-1], ["1"], [[1]], list(range(1000))])
def test_ids_that_a_server_makes_up_are_left_alone(ids: Any) -> None:
    found = {"records": [{"name": "a", "ids": ids}], "notes": []}
    named.add_token_text({"tokens": found}, Texts(Letters()))
    assert found == {"records": [{"name": "a", "ids": ids}], "notes": []}
    named.add_token_text({}, Texts(Letters()))


def test_in_this_process_a_failing_tokenizer_costs_the_text_alone() -> None:
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Identity()
    with TopTokens(tokenizer=Few()).attach(model) as few:
        model(logits)
    assert len(few.records) == 3 and not few.failures and all(record.text == () for record in few.records)
    assert len(few.notes) == 1 and "no text for id" in few.notes[0]
    with TopTokens(tokenizer=Converts(), k=1).attach(model) as converts:
        model(logits)
    assert [record.text for record in converts.records] == [(f"t{one}",) for one in logits.argmax(-1).tolist()]


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        ("nowhere", 'expected "module:callable" or a folder that AutoTokenizer reads; no folder'),
        ("tests.shared_hooks.observers.test_texts:Leters", "Did you mean Letters"),
        ("tests.shared_hooks.observers.test_texts:broken", "raised RuntimeError: no vocabulary"),
        ("tests.shared_hooks.observers.test_texts:nothing", "has no decode and no convert_ids_to_tokens"),
        (".", "reader.toml: tokenizer: "),  # no files of a tokenizer
    ],
)
def test_a_wrong_tokenizer_is_one_line(
    tokenizer: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = spec(tmp_path, tokenizer)
    with pytest.raises(SpecError, match="tokenizer: ") as raised:
        load_spec(file).load_tokenizer()
    assert says in str(raised.value)
    argv = ["run", "--server", "127.0.0.1:1", "--model", file, "--split", CUT, "--input", file, "--observe"]
    assert main([*argv, "tokens"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and says in err
    # who does not look at tokens needs none
    EdgeClient("127.0.0.1:1", file, observers=["debug"]).close()


def test_a_spec_says_it_in_words(tmp_path: Path) -> None:
    file = tmp_path / "reader.toml"
    file.write_text(SPEC.format("x").replace('"x"', "3"))
    with pytest.raises(SpecError, match='tokenizer: expected "module:callable" or a folder, found an integer'):
        load_spec(file)
    assert load_spec("digits").load_tokenizer() is None


def test_tables_and_json_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    np.save(tmp_path / "text.npy", np.arange(6)[None])
    model = spec(tmp_path, "tests.shared_hooks.observers.test_texts:Letters")
    with server("m=tests.shared_hooks.observers.small:reader", "tokens") as address:
        argv = ["run", "--server", address, "--model", model, "--split", CUT, "--input", str(tmp_path / "text.npy")]
        assert main([*argv, "--observe", "tokens", "--json", "-"]) == 0
        (one,) = json.loads(capsys.readouterr().out)["inputs"]
        (record,) = one["observations"]["cloud"]["tokens"]["records"]
        assert record["text"] == [Letters().decode([number]) for number in record["ids"]]
        assert main([*argv, "--observe", "tokens"]) == 0
        assert f'"{record["text"][0]}" {record["probabilities"][0]:.3f}, ' in capsys.readouterr().out
