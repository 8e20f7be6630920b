"""The commands as Python functions, such as `edge_client.plan`.

plan             predict every cut; decide
plan_chain       the best cuts along a chain of servers
plan_generation  the same for a language model, called token by token; its page
profile          where time, memory and energy go, on both sides
sweep            measure every cut
prune            which channels are worth sending
calibrate        what every codec costs in accuracy
learn            train a codec for one cut
leakage          what an attacker reads from what crosses
export           heads as ONNX files
engines          heads in other engines, timed and served
bench            a server under an open load
hierarchy        the module tree, what ran of it, ONNX files
layers           a model's layers, and where it can be cut
verify           every cut against the whole model
subject          a model and its inputs, from a name, a file, a module or arrays

Each takes a server first, if it uses one (None: the default of `edge_client.settings`; "own": started here), then a
model, then inputs. Each shows its progress on standard error unless ``progress=False``, prints nothing, and returns a
dataclass. May import all of the client but its command line.
"""
