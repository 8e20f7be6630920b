"""Implement ``edge-client generate``, ``chat`` and ``serve``: a language model whose first layers run here."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, TextIO

import torch
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from edge_client import interrupts
from edge_client.client import EdgeClient
from edge_client.commands import common
from edge_client.commands.common import check_json_target, credentials_of, needed, running, say, write_json
from edge_client.commands.feed import choice_of
from edge_client.commands.hooks import configured
from edge_client.core import ClientCore
from edge_client.generation import Conversation, SplitGenerator, Summary, TextStream, Words
from edge_client.generation.drafting import Assistant, Constant, Drafting, DraftSource, FirstLayers, Lookup, Measured
from edge_client.model_choice import ModelChoice
from edge_client.screen import one_line, printable, table
from edge_client.transport import ConnectionOptions
from edge_client.user_text import AUTO
from shared_hooks.errors import DeadlineExceeded, ModelFailed, SpecError, near
from shared_hooks.showing import duration, size

LEAST = ("least",)
"""In place of a number of logits: as few as are needed."""
SAMPLING = ("temperature", "top_k", "top_p", "seed")
"""Options without effect unless sampling."""


@contextmanager
def connected(options: argparse.Namespace, texts: int = 1) -> Iterator[tuple[EdgeClient, str | list[str]]]:
    """Make a client from the options, and return where to cut its model. ``texts``: number of concurrent texts, each
    with a step in flight. Raises what commands report.
    """
    server, cuts = needed(options, chain=True), options.cut.split(",")
    choice = choice_of(options)
    spec = choice.spec()
    with running(server, choice) as address:
        client = EdgeClient(
            address.split(",") if address is not None and "," in address else address,
            choice.with_spec(spec),
            metrics=False,
            deadline=options.deadline,
            lifecycle=configured(options.config, options.log_level, options.log_format),
            connection=ConnectionOptions(
                patience=options.patience, max_in_flight=max(texts, 4), credentials=credentials_of(options)
            ),
        )
        try:
            yield client, cuts if len(cuts) > 1 else options.cut
        finally:
            client.close()


@contextmanager
def speaker(options: argparse.Namespace) -> Iterator[tuple[SplitGenerator, Words]]:
    """Return the options' model, cut and connected, and its tokenizer. Raises what commands report."""
    how(options)  # before anything is loaded
    with connected(options) as (client, cut):
        generator = SplitGenerator(client, cut, answer=LEAST, codec=options.codec)
        if options.cut == AUTO:
            print_note(f"cut after {generator.cut}: a token is there soonest")
        words = Words.of(client.spec)
        client.open()
        _print_loaded(client, options)
        with generator, _drafting(options, generator):
            yield generator, words


def _print_loaded(client: EdgeClient, options: argparse.Namespace) -> None:
    if client.loaded is not None:
        print_note(f"{client.loaded} (--only-head {options.only_head})")


def how(options: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments of ``generate()``. Raises SpecError for contradictory options."""
    if not options.sample and (given := [name for name in SAMPLING if getattr(options, name) is not None]):
        raise SpecError(f"--{given[0].replace('_', '-')} is for --sample: else the likeliest token is taken")
    found: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": options.sample}
    for name in SAMPLING[:-1]:
        if (value := getattr(options, name)) is not None:
            found[name] = value
    return found


MOST_DRAFTED: Final = 32


def drafts(options: argparse.Namespace, client: ClientCore) -> tuple[DraftSource | None, int]:
    """Return the source of drafts, and their maximum length. Raises SpecError for two sources, and another
    vocabulary.
    """
    given = [name for name in ("lookup", "first_layers", "assistant") if getattr(options, name) is not None]
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise SpecError(f"{first} and {second}: drafts come from one of them")
    if options.lookup is not None:
        return Lookup(), options.lookup
    if options.first_layers is not None:
        return FirstLayers(options.first_layers), MOST_DRAFTED
    if options.assistant is None:
        return None, 0
    model = ModelChoice(options.assistant).spec().load_model(client.device)
    theirs, ours = (_vocabulary(one) for one in (model, client.wrapped.model))
    if theirs is None:
        raise SpecError(f"--assistant {options.assistant} is no language model: it has no input embeddings")
    if theirs != ours:
        raise SpecError(f"--assistant {options.assistant}: {theirs} token ids, and {client.model_id} has {ours}")
    return Assistant(model), MOST_DRAFTED


def _vocabulary(model: Any) -> int | None:
    """Return the size of a model's input embeddings; None if it has none."""
    weight = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "weight", None)
    return None if weight is None else int(weight.shape[0])


def _drafting(options: argparse.Namespace, generator: SplitGenerator) -> AbstractContextManager[Any]:
    source, most = drafts(options, generator.client)
    if source is None:
        return nullcontext()
    # with a measured pace a seed would not give the same text every time
    pace = Constant(most) if options.seed is not None else Measured(most)
    return Drafting(generator.model, source, pace=pace)


def draw(options: argparse.Namespace) -> None:
    """Seed random numbers with --seed."""
    if options.seed is not None:
        torch.manual_seed(options.seed)


def print_note(text: str) -> None:
    """Print a line about the text to standard error."""
    console = Console(stderr=True, highlight=False)
    console.print(Text(printable(text), style="dim" if console.is_terminal else ""), soft_wrap=not console.is_terminal)


def figures(summary: Summary) -> str:
    """Format a summary, and a token's traffic."""
    up, down = summary.bytes_up_per_token, summary.bytes_down_per_token
    each = "" if up is None else f" ({size(up)} and {size(down)} a token)"
    return f"{summary.line}{each}"


# Completing a text.


def generate(options: argparse.Namespace) -> int:
    """Write the text to standard output and its cost to standard error; return the exit status."""
    check_json_target(options.json)
    for name in ("lookup", "first_layers", "assistant"):
        if options.beams > 1 and getattr(options, name) is not None:
            word = name.replace("_", "-")
            raise SpecError(f"--{word} drafts one sequence, and --beams searches among several: one of them")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with speaker(options) as (generator, words):
        text, ids = _written(options, generator, words, prompt)
        summary = generator.summary
        assert summary is not None
        print_note(figures(summary))
        if options.json:
            reported = {
                "model": generator.client.model_id,
                "server": generator.client.server,
                "cut": ",".join(generator.cuts),
                "prompt": prompt,
                "text": text,
                "token_ids": ids,
                "unlike": list(generator.client.unlike),
                "exit_status": common.OK,
                **summary.as_dict(),
            }
            write_json(reported, options.json, options.stdout)
    return common.OK


def _written(
    options: argparse.Namespace, generator: SplitGenerator, words: Words, prompt: str
) -> tuple[str, list[int]]:
    """Show and return the text and token ids that followed the prompt."""
    requested = words.encode(prompt)
    if not requested:
        raise SpecError("--prompt: the tokenizer makes no token of it, so there is nothing to go on from")
    flow = Flow(sys.stdout)
    streams = options.beams == 1 and not options.no_stream
    stream = TextStream(words, flow.write)
    draw(options)
    ids = torch.tensor([requested], device=generator.client.device)
    try:
        output = generator.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=options.beams,
            pad_token_id=words.pad,
            streamer=stream if streams else None,
            **how(options),
        )
        assert generator.summary is not None
        made = output[0].tolist()[-generator.summary.tokens :] if generator.summary.tokens else []
        text = words.decode(made)
        if not streams:
            flow.write(text)
    finally:
        flow.end()
    return text, made


# Chat turns; the model's state stays on both sides.


WORDS: Final = {
    "/quit": "end; so does the end of the input",
    "/reset": "start again, with an empty conversation",
    "/stats": "what the turns took",
    "/help": "these words",
}
KNOWN: Final = f"{', '.join(WORDS)}."
PROMPT: Final = "> "


def chat(options: argparse.Namespace) -> int:
    """Answer line by line until the input ends; return the exit status."""
    check_json_target(options.json)
    status = common.OK
    with speaker(options) as (generator, words):
        draw(options)
        talk = Conversation(generator, words, system=options.system, **how(options))
        if sys.stdin.isatty():
            print_note(f"{generator.client.model_id}, cut after {', '.join(generator.cuts)}. {KNOWN}")
        done: list[dict[str, Any]] = []
        while (line := _read()) is not None:
            word = line.strip()
            if word == "/quit":
                break
            if word.startswith("/"):
                _obey(word, talk)
            elif word:
                status = max(status, _answer(talk, line, done))
    if options.json:
        reported = {
            "model": generator.client.model_id,
            "server": generator.client.server,
            "cut": ",".join(generator.cuts),
            "turns": done,
            "exit_status": status,
        }
        write_json(reported, options.json, options.stdout)
    return status


def _read() -> str | None:
    """Return the next line; None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    import readline  # noqa: F401 - from now on input() can be edited

    try:
        return input(PROMPT)
    except EOFError:
        print()
        return None


def _answer(chat: Conversation, text: str, done: list[dict[str, Any]]) -> int:
    """Answer and stream one turn. Ctrl-C ends the turn, not the chat."""
    flow = Flow(sys.stdout)
    try:
        turn = chat.say(text, flow.write)
    except KeyboardInterrupt:
        interrupts.acknowledge()
        flow.end()
        print_note("interrupted: this turn does not count")
        return common.OK
    except (DeadlineExceeded, ModelFailed) as error:
        flow.end()
        say(f"{one_line(str(error))}", "error")
        return common.SOME_FAILED
    finally:
        flow.end()
    print_note(figures(turn.summary))
    done.append({"said": text, "text": turn.text, "read": turn.read, "kept": turn.kept, **turn.summary.as_dict()})
    return common.OK


def _obey(word: str, chat: Conversation) -> None:
    if word == "/reset":
        chat.reset()
        print_note("nothing was said")
    elif word == "/stats":
        _print_lines(_stats(chat) if chat.turns else "no turn yet")
    elif word == "/help":
        _print_lines("\n".join(f"{name:<8}{meaning}" for name, meaning in WORDS.items()))
    else:
        print_note(f'no "{word}".{near(word, WORDS) or f" {KNOWN}"}')


def _print_lines(text: str) -> None:
    """Print several lines, as `print_note` does."""
    for line in text.splitlines():
        print_note(line)


def _stats(chat: Conversation) -> str:
    rows = []
    for number, turn in enumerate(chat.turns, 1):
        of = turn.summary
        rate = of.tokens_per_second
        rows.append(
            (
                str(number),
                str(turn.kept),
                str(turn.read),
                str(of.tokens),
                "-" if rate is None else f"{rate:.1f}",
                duration(of.first_token_ns),
                size(of.bytes_up),
                size(of.bytes_down),
            )
        )
    heads = ("turn", "kept", "read", "tokens", "tokens/s", "first", "up", "down")
    return table(heads, rows, right=range(8))


# The endpoint for applications


def serve(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit status."""
    try:
        from edge_client.serving.app import Endpoint
    except ModuleNotFoundError as error:
        raise SpecError(f'serve needs {error.name}: pip install "isthmus[serve]"') from error
    from edge_client.serving.chats import Chats

    if options.json:
        raise SpecError("--json: serve writes no results; each answer has its figures (usage.isthmus)")
    key = ""
    if options.key_file is not None:
        key = Path(options.key_file).read_text(encoding="utf-8").strip()
        if not key:
            raise SpecError(f"--key-file: {options.key_file} is empty")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with connected(options, options.seats) as (client, cut):
        client.open()
        _print_loaded(client, options)
        source, most = drafts(options, client)
        more = {"codec": options.codec, "drafts": source, "most_drafted": most or 1}
        chats = Chats(client, cut, seats=options.seats, exact=not options.together, **more)
        try:
            with Endpoint(chats, options.listen, key) as endpoint:
                print(f"listening on {endpoint.url}, model {endpoint.model}", file=options.stdout, flush=True)
                while not ended.wait(0.5):
                    pass
        except KeyboardInterrupt:
            interrupts.acknowledge()
        finally:
            chats.close()
    return common.OK


# Writes text that comes in pieces, to a screen or into a file.

NARROWEST: Final = 10
"""Minimum columns of a terminal on which words are kept whole."""


class Flow:
    """Writes text immediately. On a terminal a word that does not fit at the end of a line moves whole to the next one.

    Control characters other than line ends are escaped, as a model may generate anything.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._width = shutil.get_terminal_size().columns - 1 if out.isatty() else 0
        self._column = 0
        self._word = ""
        self._open = False

    def write(self, text: str) -> None:
        """Write text of any length."""
        for one in text:
            self._put("\n" if one == "\n" else " " if one == "\t" else printable(one))
        self._out.flush()

    def end(self) -> None:
        """End the line, if one is open."""
        if self._open:
            self._put("\n")
            self._out.flush()

    def _put(self, one: str) -> None:
        if one == "\n":
            self._out.write(one)
            self._column, self._word, self._open = 0, "", False
            return
        self._open = True
        size = cell_len(one)
        if self._width >= NARROWEST and self._column + size > self._width and self._turn(one):
            return
        self._word = "" if one == " " else self._word + one
        self._column += size
        self._out.write(one)

    def _turn(self, one: str) -> bool:
        """Continue on the next line, with the current word; return True if ``one`` is not needed there."""
        if one == " ":
            self._out.write("\n")
            self._column, self._word = 0, ""
            return True
        size = cell_len(self._word)
        if size >= self._column:  # longer than a line
            self._word = ""
        elif size:
            self._out.write(f"\x1b[{size}D\x1b[K")
        self._out.write(f"\n{self._word}")
        self._column = cell_len(self._word)
        return False
