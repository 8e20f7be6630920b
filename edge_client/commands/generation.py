"""The options of ``edge-client generate`` and ``edge-client chat``; they load nothing."""

from __future__ import annotations

from edge_client.commands.common import Commands
from edge_client.commands.credentials import add_credentials
from edge_client.commands.kinds import count, number, rate, seconds, share
from edge_client.commands.server import add_server
from shared_hooks.command_line import Parser

CODECS = ("int8", "int6", "int5", "int4")
"""As `shared_hooks.generation.hidden` has them, which loads torch."""


def add_generation(commands: Commands, model: Parser) -> tuple[Parser, Parser]:
    """Both commands."""
    generate = commands.add_parser(
        "generate", parents=[model], help="continue a text with a language model, split: its layers here and there"
    )
    generate.add_argument("--prompt", required=True, metavar="TEXT|-", help='"-" for standard input')
    generate.add_argument("--no-stream", action="store_true", help="write the text when all of it is there")
    generate.add_argument(
        "--beams",
        type=count,
        default=1,
        metavar="N",
        help="search with N beams; the text comes at the end (default: 1)",
    )
    chat = commands.add_parser(
        "chat",
        parents=[model],
        help="talk with a language model, split; what was said stays in its state on both sides",
    )
    chat.add_argument("--system", default="", metavar="TEXT", help="before the first turn, such as a role")
    for command in (generate, chat):
        _add_common(command)
    return generate, chat


def _add_common(command: Parser) -> None:
    add_server(command)
    add_credentials(command)
    command.add_argument(
        "--cut",
        "--split",
        dest="cut",
        required=True,
        metavar="NAME|auto",
        help='the module after which the model is cut, such as model.layers.3; "auto" measures for some seconds',
    )
    command.add_argument(
        "--only-head",
        metavar="NAME",
        help="load only the weights up to this module, the cut or a later one; the others stay in their files",
    )
    command.add_argument(
        "--max-new-tokens", type=count, default=128, metavar="N", help="write at most so many (default: 128)"
    )
    command.add_argument("--sample", action="store_true", help="draw tokens by chance (default: always the likeliest)")
    command.add_argument("--temperature", type=rate, metavar="X", help="with --sample: below 1 more of the likeliest")
    command.add_argument("--top-k", type=count, metavar="N", help="with --sample: among the N likeliest")
    command.add_argument(
        "--top-p", type=share, metavar="P", help="with --sample: among the likeliest that add up to P, 0 to 1"
    )
    command.add_argument("--seed", type=number, metavar="N", help="with --sample: the same text every time")
    command.add_argument(
        "--lookup",
        type=count,
        metavar="N",
        help="draft up to N tokens from what was read, and have them checked in one round trip",
    )
    command.add_argument(
        "--codec",
        choices=CODECS,
        help="send hidden states in fewer bytes; values change a little, and so may the text (default: as they are)",
    )
    command.add_argument("--deadline", type=seconds, default=60.0, metavar="S", help="for each step (default: 60)")
    command.add_argument("--patience", type=seconds, default=15.0, metavar="S", help="wait for a server (default: 15)")
