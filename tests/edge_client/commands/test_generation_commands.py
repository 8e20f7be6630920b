"""``edge-client generate`` and ``chat``: what they write, where, and what they refuse."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from edge_client import local_server
from edge_client.__main__ import main
from shared_hooks.models import load_spec
from tests.edge_client.generation.speaking import CUT, SPEC, TEXT

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_SERVER", raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with local_server(SPEC) as address:
        yield address


def words(command: str, server: str, *more: str, cut: str = CUT) -> list[str]:
    return [command, "--model", SPEC, "--server", server, "--cut", cut, "--max-new-tokens", "8", *more]


def alone() -> str:
    """The continuation by the model in one piece."""
    spec = load_spec(SPEC)
    tokenizer, model = spec.load_tokenizer(), spec.load_model()
    ids = torch.tensor([tokenizer.encode(TEXT)])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_text_on_standard_output_and_figures_beside_it(server: str, capsys: Captured) -> None:
    assert main(words("generate", server, "--prompt", TEXT)) == 0
    out, err = capsys.readouterr()
    assert out == alone() + "\n"
    assert err.startswith("8 tokens, ") and err.count("\n") == 1
    assert "8 round trips" in err and "a token)" in err
    assert main(words("generate", server, "--prompt", TEXT, "--no-stream")) == 0
    assert capsys.readouterr().out == out


def test_the_prompt_from_standard_input(server: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert main(words("generate", server, "--prompt", "-")) == 0
    assert capsys.readouterr().out == alone() + "\n"


def test_json_is_alone_on_standard_output(server: str, capsys: Captured) -> None:
    assert main(words("generate", server, "--prompt", TEXT, "--json", "-")) == 0
    known = json.loads(capsys.readouterr().out)
    assert (known["text"], known["cut"], known["tokens"], known["round_trips"]) == (alone(), CUT, 8, 8)
    assert len(known["token_ids"]) == 8
    assert known["bytes_up"] > 8 * known["bytes_up_per_token"] > 0


def test_a_seed_gives_the_same_text_again(server: str, capsys: Captured) -> None:
    sampled = ("--prompt", TEXT, "--sample", "--top-k", "50", "--temperature", "0.9", "--seed")
    texts = []
    for seed in ("3", "3", "4"):
        assert main(words("generate", server, *sampled, seed)) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_weights_of_the_other_half_stay_in_their_file(server: str, capsys: Captured, tmp_path: Path) -> None:
    weights = str(tmp_path / "weights.safetensors")
    save_model(load_spec(SPEC).load_model(), weights)
    assert main(words("generate", server, "--prompt", TEXT, "--weights", weights, "--only-head", CUT)) == 0
    out, err = capsys.readouterr()
    assert out == alone() + "\n"
    assert "of the weights are in memory" in err


WAYS = [
    ("--beams", "3"),
    ("--lookup", "3"),
    ("--first-layers", "model.layers.1"),
    ("--assistant", SPEC),
    ("--sample", "--top-p", "0.5"),
    ("--sample", "--lookup", "2", "--seed", "1"),
    ("--codec", "int8"),
]


@pytest.mark.parametrize("more", WAYS, ids=str)
def test_other_ways_to_write(server: str, capsys: Captured, more: tuple[str, ...]) -> None:
    assert main(words("generate", server, "--prompt", TEXT, *more)) == 0
    assert "8 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "cut", "says"),
    [
        (("--top-k", "3"), CUT, "--top-k is for --sample"),
        (("--seed", "3"), CUT, "--seed is for --sample"),
        (("--beams", "2", "--lookup", "3"), CUT, "one of them"),
        (("--beams", "2", "--assistant", SPEC), CUT, "one of them"),
        (("--first-layers", "model.layers.1", "--lookup", "3"), CUT, "drafts come from one of them"),
        (("--first-layers", "model.layers.5"), CUT, "is the last block"),
        (("--assistant", "nowhere.toml"), CUT, "nowhere.toml"),
        (("--assistant", "digits"), CUT, "--assistant digits is no language model"),
        ((), "model.layer.2", "Did you mean model.layers.2"),
        ((), "input", "model.layers.0 to model.layers.5"),
        ((), "lm_head", "lm_head"),
        (("--prompt", ""), CUT, "nothing to go on from"),
        (("--model", "digits"), CUT, "has no generate()"),
    ],
)
def test_refusals(server: str, capsys: Captured, more: tuple[str, ...], cut: str, says: str) -> None:
    assert main([*words("generate", server, "--prompt", TEXT, cut=cut), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("edge-client: error: ") and err.count("\n") == 1
    assert says in err


def test_no_server(capsys: Captured) -> None:
    assert main(words("generate", "127.0.0.1:9", "--prompt", TEXT, "--patience", "0.2")) == 3
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_drafts_change_nothing_in_later_turns(
    server: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = []
    for more in ((), ("--lookup", "4"), ("--first-layers", "model.layers.1"), ("--assistant", SPEC)):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand you?\nhello\n"))
        assert main(words("chat", server, "--json", str(tmp_path / "chat.json"), *more)) == 0
        turns = json.loads((tmp_path / "chat.json").read_text())["turns"]
        assert all(turn["kept"] for turn in turns[1:])
        texts.append([turn["text"] for turn in turns])
    assert texts[1:] == texts[:1] * 3


def test_a_chat_from_a_pipe(server: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = ["hello", "", "/stats", "and you?", "/xyz", "/stat", "/reset", "hello", "/quit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(words("chat", server, "--json", str(tmp_path / "chat.json"))) == 0
    out, err = capsys.readouterr()
    known = json.loads((tmp_path / "chat.json").read_text())
    turns = known["turns"]
    assert [turn["said"] for turn in turns] == ["hello", "and you?", "hello"]
    assert out == "".join(f"{turn['text']}\n" for turn in turns)
    assert turns[0]["text"] == turns[2]["text"], "nothing was said before either"
    assert [bool(turn["kept"]) for turn in turns] == [False, True, False]
    assert 'no "/xyz". /quit' in err and 'no "/stat". Did you mean /stats' in err
    assert "tokens/s" in err and "nothing was said" in err
