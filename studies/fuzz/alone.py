"""Every statement in a program of its own: what a long run begins with."""

from __future__ import annotations

from studies.fuzz.kinds import SIMPLE
from studies.fuzz.program import FORMS, INPUTS, OUTPUTS, Program, Step
from studies.fuzz.scopes import SCOPES
from studies.fuzz.stores import STORES, VALUES

READERS = {  # what shows a scope, within it
    "flag up": Step("read flag"),
    "flag turned": Step("read flag"),
    "flag managed": Step("read flag"),
    "child training": Step("read training"),
    "training flag kept": Step("read training"),
    "all training": Step("read own training"),
    "default dtype": Step("read default dtype"),
    "scope stack": Step("read scopes"),
    "autocast": Step("read autocast"),
    "store for a while": Step("get"),
}


PARTS = 4  # of a test run, so that processes may share them


def alone() -> list[Program]:
    """Every statement, store, value, way to be called and form of answer in a program of its own."""
    layer = Step("linear")
    found = [Program((layer, layer, Step(kind, 0, 1, 1), layer)) for kind in SIMPLE]
    found += [Program((layer, layer, Step(kind, 0, 1, 1, (layer, READERS.get(kind, layer))), layer)) for kind in SCOPES]
    for store in STORES:
        for value in range(len(VALUES)):
            put, get = Step("put", b=value), Step("get", a=int(store == "tag"))  # the tensor that was tagged
            found.append(Program((put, layer, get, layer), stores=(store,)))
            found.append(Program((layer, Step("block", b=1), layer, get, layer), ((put, layer),), stores=(store,)))
    for number in range(max(len(INPUTS), len(OUTPUTS)) * 2):
        way, form = INPUTS[number % len(INPUTS)], OUTPUTS[number % len(OUTPUTS)]
        found.append(Program((layer,), inputs=way, output=form))
    found += [Program((Step("block"), layer), ((Step("linear"),),), forms=(form, "tensor")) for form in FORMS]
    return found
