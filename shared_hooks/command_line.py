"""Define the parser of both commands: one-line errors with suggestions; ``--version``; shell completion.

Loads no torch, even for errors: a mistyped word must not take seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from shared_hooks.errors import near

SHELLS = ("bash", "zsh", "tcsh")
USAGE = 2


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose errors are one line each, with similar names; for sub-commands, too.

    ``--help`` shows the options in `basic`, ``--help all`` every option by the `topics`; without `basic` both show all.
    """

    def __init__(self, *, add_help: bool = True, **how: Any) -> None:
        super().__init__(**{**how, "allow_abbrev": False, "add_help": False})  # an abbreviated option is a mistake
        self.basic: Collection[str] = ()
        self.topics: Mapping[str, Collection[str]] = {}
        """Headings of ``--help all``, and the options below each."""
        if add_help:
            self.add_argument("-h", "--help", action=_Help, help="show this help and exit")

    def short_help(self) -> str:
        """Return what ``--help`` prints."""
        if not self.basic:
            return self.format_help()
        by_name = {name: one for one in self._actions for name in one.option_strings}
        shown = [by_name[name] for name in (*self.basic, "--help") if name in by_name]
        shown.sort(key=lambda one: not one.required)
        formatter = self._get_formatter()
        self._start(formatter)
        formatter.start_section("options")
        formatter.add_arguments(shown)
        formatter.end_section()
        more = sum(bool(one.option_strings) for one in self._actions) - len(shown)
        formatter.add_text(f"{more} more options: {self.prog} --help all")
        return formatter.format_help()

    def format_help(self) -> str:
        """Return every option: what ``--help all`` prints."""
        if not self.topics:
            return super().format_help()
        formatter = self._get_formatter()
        self._start(formatter)
        left = [one for one in self._actions if one.option_strings]
        for topic, options in {**self.topics, "other": None}.items():
            found = [one for one in left if options is None or self._is_in(one, options)]
            left = [one for one in left if one not in found]
            formatter.start_section(topic)
            formatter.add_arguments(found)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _start(self, formatter: argparse.HelpFormatter) -> None:
        """Add usage, description, and positional arguments."""
        words = [one for one in self._actions if not one.option_strings]
        formatter.add_usage(f"%(prog)s {self._usage()}", [], [])
        formatter.add_text(self.description)
        formatter.start_section("arguments")
        formatter.add_arguments(words)
        formatter.end_section()

    def _usage(self) -> str:
        required = [one for one in self._actions if one.option_strings and one.required]
        words = [
            str(one.metavar) if one.nargs != "?" else f"[{one.metavar}]"
            for one in self._actions
            if not one.option_strings
        ]
        return " ".join(
            [
                *(f"{one.option_strings[0]} {str(one.metavar).partition('|')[0]}" for one in required),
                "[options]",
                *words,
            ]
        )

    @staticmethod
    def _is_in(action: argparse.Action, options: Collection[str]) -> bool:
        return any(name in options for name in action.option_strings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as the original, and report a superfluous word at once, while its command is known."""
        self._check_options(sys.argv[1:] if args is None else args)  # before a missing argument is reported
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(self._left_over(left[0]))
        return found, left

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, and one line on standard error."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and message.endswith(f"required: {action.metavar}"):
                message = f"say what to do: {', '.join(action.choices)}"
        print(f"{self.prog}: error: {' '.join(message.split())} ({self.prog} --help)", file=sys.stderr)
        self.exit(USAGE)

    def _left_over(self, word: str) -> str:
        if word.startswith("-"):
            option = word.partition("=")[0]
            return f"there is no option {option}.{near(option, self._option_string_actions)}"
        if "--model" in self._option_string_actions:
            return f'"{word}" is one word too many; a model is named by --model {word}'
        return f'"{word}" is one word too many'

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(one) for one in action.choices]
            listed = f"{', '.join(known)}.{near(str(value), known)}"
            raise argparse.ArgumentError(action, f'"{value}" is not one of {listed}')

    def _check_options(self, words: Sequence[str]) -> None:
        commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        for word in words:
            if word == "--" or (commands and not word.startswith("-")):
                return
            option = word.partition("=")[0]
            if word.startswith("--") and option not in self._option_string_actions:
                self.error(self._left_over(word))


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add ``--version`` and ``--print-completion``."""
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    parser.add_argument(
        "--print-completion",
        action=_Completion,
        choices=SHELLS,
        help="print what completes words in this shell, and exit (extra completion)",
    )


def open_closed_streams() -> None:
    """Open the null device in place of standard streams that the caller has closed, as some service managers do.

    Otherwise the next file or socket gets their number, and what C++ prints would go into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, and so this one
            os.set_inheritable(opened, True)
            setattr(sys, name, open(opened, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def quiet_libraries() -> None:
    """Hide progress bars of libraries that a model's code uses (transformers). Call it before they are loaded."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")


class _Help(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", default=argparse.SUPPRESS, metavar="all", **how)

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        assert isinstance(parser, Parser)
        if value not in (None, "all"):
            parser.error(f'{option}: "{value}" is not one of all')
        print(parser.format_help() if value else parser.short_help(), end="")
        parser.exit()


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **how)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from shared_hooks.version import __version__

        print(f"{parser.prog} {__version__} (Python {sys.version.split()[0]})")
        parser.exit()


class _Completion(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, **how)

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, option: str | None = None) -> None:
        try:
            import shtab
        except ImportError:
            parser.error(f'{option}: shtab is missing: pip install "isthmus[completion]"')
        for one in _all(parser):
            shown = str(one.metavar)
            if one.choices is None and ("FILE" in shown or "PATH" in shown or "SPEC" in shown):
                one.complete = shtab.FILE  # type: ignore[attr-defined]
            elif one.choices is None and ("DIR" in shown or "FOLDER" in shown):
                one.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        try:
            print(shtab.complete(parser, shell), flush=True)
        except BrokenPipeError:  # the reader has left, and nothing can be flushed any more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit()


def _all(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser, and of its sub-commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _all(inner)
