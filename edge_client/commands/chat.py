"""``edge-client chat``: turns with a language model that is split; its state stays on both sides."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from edge_client import interrupts
from edge_client.commands import common
from edge_client.commands.common import check_json_target, say, write_json
from edge_client.commands.speaking import draw, figures, how, speaker, tell
from edge_client.generation import Conversation
from edge_client.screen.flow import Flow
from edge_client.screen.text import one_line, table
from shared_hooks.errors import DeadlineExceeded, ModelFailed, near
from shared_hooks.showing import duration, size

WORDS: Final = {
    "/quit": "end; so does the end of the input",
    "/reset": "start again: nothing was said",
    "/stats": "what the turns took",
    "/help": "these words",
}
KNOWN: Final = f"{', '.join(WORDS)}."
PROMPT: Final = "> "


def main(options: argparse.Namespace) -> int:
    """Answer line by line until the input ends; exit status."""
    check_json_target(options.json)
    status = common.OK
    with speaker(options) as (generator, words):
        draw(options)
        chat = Conversation(generator, words, system=options.system, **how(options))
        if sys.stdin.isatty():
            tell(f"{generator.client.model_id}, cut after {generator.cut}. {KNOWN}")
        done: list[dict[str, Any]] = []
        while (line := _read()) is not None:
            word = line.strip()
            if word == "/quit":
                break
            if word.startswith("/"):
                _obey(word, chat)
            elif word:
                status = max(status, _answer(chat, line, done))
    if options.json:
        said = {
            "model": generator.client.model_id,
            "server": generator.client.server,
            "cut": generator.cut,
            "turns": done,
            "exit_status": status,
        }
        write_json(said, options.json, options.stdout)
    return status


def _read() -> str | None:
    """The next line; None at the end."""
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
    """One turn, shown as it comes. Ctrl-C ends the turn and not the chat."""
    flow = Flow(sys.stdout)
    try:
        turn = chat.say(text, flow.write)
    except KeyboardInterrupt:
        interrupts.heard()
        flow.end()
        tell("interrupted: this turn does not count")
        return common.OK
    except (DeadlineExceeded, ModelFailed) as error:
        flow.end()
        say(f"{one_line(str(error))}", "error")
        return common.SOME_FAILED
    finally:
        flow.end()
    tell(figures(turn.summary))
    done.append({"said": text, "text": turn.text, "read": turn.read, "kept": turn.kept, **turn.summary.as_dict()})
    return common.OK


def _obey(word: str, chat: Conversation) -> None:
    if word == "/reset":
        chat.reset()
        tell("nothing was said")
    elif word == "/stats":
        _tell_lines(_stats(chat) if chat.turns else "no turn yet")
    elif word == "/help":
        _tell_lines("\n".join(f"{name:<8}{meaning}" for name, meaning in WORDS.items()))
    else:
        tell(f'no "{word}".{near(word, WORDS) or f" {KNOWN}"}')


def _tell_lines(text: str) -> None:
    """As `tell`, of several lines."""
    for line in text.splitlines():
        tell(line)


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
