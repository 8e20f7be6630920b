"""A program as Python source: a file of one ``nn.Module`` called ``Model``, and how it is called."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from studies.fuzz.kinds import SIMPLE
from studies.fuzz.program import Program, Step
from studies.fuzz.scopes import SCOPES
from studies.fuzz.stores import STORES, VALUES, Store

FIRST = {  # how the forward begins: its parameters, and how registers are made of them
    "one": ("x", "", ["x"]),
    "two": ("x, late", "", ["x", "late"]),
    "keyword": ("x, *, late=None", "", ["x", "late"]),
    "start and end": ("start, end", "x = start * 1", ["x", "end"]),
    "same twice": ("x, late", "", ["x", "late"]),
    "view of the first": ("x, late", "late = late.expand_as(x)", ["x", "late"]),
    "list": ("given", "x, late = given", ["x", "late"]),
    "dict": ("given", 'x, late = given["x"], given["late"]', ["x", "late"]),
    "odd address": ("x", "", ["x"]),
    "subclass": ("x", "late = x * getattr(x, 'scale', 1.0)", ["x", "late"]),
    "number": ("x, factor", "late = x * factor", ["x", "late"]),
    "conjugate": ("x", "x = torch.view_as_real(x * 1).reshape(-1, 8)", ["x"]),
}
_DATACLASS = "import dataclasses\n@dataclasses.dataclass\nclass Answer:\n    last: object\n    first: object"
_NAMED = "import collections\nAnswer = collections.namedtuple('Answer', 'last first')"
LAST = {  # how it ends: what is returned, and what that needs at the module's level
    "last": ("{a}", ""),
    "three": ("{a}, {b}, {c}", ""),
    "dict": ('{{"a": {a}, "b": {b}}}', ""),
    "list": ("[{a}, {b}]", ""),
    "dataclass": ("Answer({a}, {c})", _DATACLASS),
    "named tuple": ("Answer({a}, {c})", _NAMED),
    "nested": ('{{"a": [{a}, ({b},)], "n": None}}', ""),
    "views": ("{a}, {a}[:, 1:3], {a}.T", ""),
    "number": ("{a}, {a}.shape[0]", ""),
}
_FORMS = {  # what a block answers, and how it is taken
    "tensor": ("{a}", "{y} = {call}"),
    "pair": ("{a}, {b}", "{y}, other = {call}\n{y} = {y} + 0.5 * other"),
    "dict": ('{{"a": {a}, "more": [{b}]}}', 'held = {call}\n{y} = held["a"] - held.pop("more")[0]'),
}
STORING = ("put", "get", "store for a while")
TAGGED = "class Tagged(torch.Tensor):\n    pass"


@dataclass
class Source:
    """``features``: names of all that the program uses."""

    text: str
    features: frozenset[str]


@dataclass
class _Class:
    """The class that is being written."""

    level: int  # 0 is the root; blocks call blocks of higher levels
    init: dict[str, None] = field(default_factory=dict)
    made: int = 0


class Writer:
    """Writes one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.top: dict[str, None] = {}
        self.classes: dict[int, str] = {}
        self.features: set[str] = set()
        self.shared: dict[str, None] = {}
        self.context: dict[str, None] = {}
        self.stores = [(name, STORES[name]) for name in program.stores]
        reached = {kind for steps in (program.root, *program.blocks) for kind in kinds_in(steps)}
        used = [self.stores[n % len(self.stores)][1] for kind, n in reached if kind in STORING]
        self.has_box, self.has_context = any(s.shared for s in used), any(s.context for s in used)

    def write(self) -> Source:
        """Raises nothing: every program is a model, though some fail when they run."""
        program = self.program
        parameters, first, names = FIRST[program.inputs]
        if program.inputs == "subclass":
            self.top[TAGGED] = None
        self.features |= {f"inputs: {program.inputs}", f"output: {program.output}"}
        if program.training:
            self.features.add("training mode")
        if program.depth is not None:
            self.features.add(f"depth {program.depth}")
        if program.second:
            self.features.add("second signature")
        root = _Class(0)
        body, registers = self.steps(root, program.root, list(names))
        returned, needs = LAST[program.output]
        if needs:
            self.top[needs] = None
        answer = returned.format(a=registers[-1], b=registers[-2 % len(registers)], c=registers[0])
        lines = [*first.splitlines(), *self.opened_context(), *body, f"return {answer}"]
        model = self.one_class("Model", root, parameters, lines)
        parts = ["import torch\nfrom torch import nn", *self.top, *self.objects()]
        parts += [self.classes[number] for number in sorted(self.classes, reverse=True)]
        return Source("\n".join(_ordered([*parts, model])) + "\n", frozenset(self.features))

    # -- the module's level ---------------------------------------------------------------------------------------

    def objects(self) -> list[str]:
        """The classes of the object that modules share and of the one that a forward hands along."""
        found = []
        for name, used, init in (("Box", self.has_box, self.shared), ("Context", self.has_context, self.context)):
            if used:
                found.append(f"class {name}:\n    def __init__(self):\n" + _indented(list(init) or ["pass"], 2))
        return found

    def opened_context(self) -> list[str]:
        return ["ctx = Context()"] if self.has_context else []

    def one_class(self, name: str, cls: _Class, parameters: str, lines: list[str]) -> str:
        box = self.has_box
        init = ["super().__init__()", *(["self.box = box or Box()"] if box else []), *cls.init]
        text = [f"class {name}(nn.Module):"]
        text += [f"    def __init__(self{', box=None' if box else ''}):", _indented(init, 2)]
        text += [f"    def forward(self, {parameters}):", _indented(lines, 2)]
        return "\n".join(text)

    # -- statements -----------------------------------------------------------------------------------------------

    def steps(self, cls: _Class, steps: tuple[Step, ...], registers: list[str]) -> tuple[list[str], list[str]]:
        """(lines, registers after them)."""
        lines: list[str] = []
        for step in steps:
            lines += self.step(cls, step, registers)
        return lines, registers

    def step(self, cls: _Class, step: Step, registers: list[str]) -> list[str]:
        a, b = registers[-1 - step.a % len(registers)], registers[-1 - step.b % len(registers)]
        if step.kind == "drop" and (len(registers) < 2 or a == b):
            return []
        self.features.add(step.kind)
        names = {"a": a, "b": b, "n": step.n, "s": step.n % 3, "k": step.n % 2, "y": f"y{cls.made}"}
        if step.kind in ("put", "get"):
            return self.stored(cls, step, names, registers)
        if step.kind == "block":
            return self.block(cls, step, names, registers)
        kind = SIMPLE.get(step.kind) or SCOPES[step.kind]
        for line in kind.init:
            cls.init[line.format_map(names)] = None
        for declaration in kind.top:
            self.top[declaration] = None
        if "{y}" in kind.text:
            cls.made += 1
        if step.kind in SCOPES:
            text = self.compound(cls, step, kind.text, names, registers)
        else:
            text = kind.text.format_map(names)
        if step.kind == "drop":
            registers.remove(b)
        elif "{y}" in kind.text:
            registers.append(str(names["y"]))
        return text.splitlines()

    def compound(self, cls: _Class, step: Step, text: str, names: dict[str, object], registers: list[str]) -> str:
        body, after = self.steps(cls, step.body, [*registers[-4:], str(names["a"])])
        made = after[-1]
        names["last"] = made
        if "{put}" in text:
            store = self.store(cls, step, names)
            names["get"] = store.get.format_map(names)
            names["put"] = store.put.format_map({**names, "v": f"{step.n}.0"})
            names["put_kept"] = store.put.format_map({**names, "v": "kept"})
        written = []
        for line in text.splitlines():
            if line.strip() == "{body}":
                indent = line[: len(line) - len("{body}")]
                written += [indent + inner for inner in body or ["pass"]]
            else:
                written.append(line.format_map(names))
        return "\n".join(written)

    def store(self, cls: _Class, step: Step, names: dict[str, object]) -> Store:
        name, store = self.stores[step.n % len(self.stores)]
        self.features.add(f"store: {name}")
        for declaration in store.top:
            self.top[declaration] = None
        where = self.shared if store.shared else self.context if store.context else cls.init
        for line in store.init:
            where[line] = None
        return store

    def stored(self, cls: _Class, step: Step, names: dict[str, object], registers: list[str]) -> list[str]:
        store = self.store(cls, step, names)
        old = store.get.format_map(names)
        if step.kind == "get":
            cls.made += 1
            registers.append(str(names["y"]))
            return [f"{names['y']} = {names['a']} * {old}"]
        value = list(VALUES)[step.b % len(VALUES)]
        self.features.add(f"value: {value}")
        return [store.put.format_map({**names, "v": VALUES[value].format_map({**names, "old": old})})]

    def block(self, cls: _Class, step: Step, names: dict[str, object], registers: list[str]) -> list[str]:
        number = cls.level + 1 + step.n % 2
        if number > len(self.program.blocks):
            return []
        form = self.program.forms[number - 1]
        if number not in self.classes:
            block = _Class(number)
            self.classes[number] = ""  # takes its place
            lines, inner = self.steps(block, self.program.blocks[number - 1], ["late", "x"])
            context = ", ctx" if self.has_context else ""
            self.features.add(f"block answers: {form}")
            lines.append("return " + _FORMS[form][0].format(a=inner[-1], b=inner[0]))
            self.classes[number] = self.one_class(f"Block{number}", block, f"x, late{context}", lines)
        box = "self.box" if self.has_box else ""
        cls.init[f"self.b{number} = Block{number}({box})"] = None
        cls.made += 1
        registers.append(str(names["y"]))
        context = ", ctx" if self.has_context else ""
        call = f"self.b{number}({names['a']}, {names['b']}{context})"
        return _FORMS[form][1].format(y=names["y"], call=call).splitlines()


def _indented(lines: list[str], level: int) -> str:
    return "\n".join("    " * level + line for text in lines for line in text.splitlines())


def _ordered(parts: list[str]) -> list[str]:
    """Imports first."""
    lines = [line for part in parts for line in part.splitlines()]
    imports = [line for line in lines if re.match(r"(import|from) ", line)]
    return [*dict.fromkeys(imports), *(line for line in lines if line not in imports)]


def kinds_in(steps: tuple[Step, ...]) -> set[tuple[str, int]]:
    """Kinds, with their numbers, at any depth."""
    return {(step.kind, step.n) for step in steps} | {found for step in steps for found in kinds_in(step.body)}


def source_of(program: Program) -> Source:
    """The program's text and what it uses."""
    return Writer(program).write()
