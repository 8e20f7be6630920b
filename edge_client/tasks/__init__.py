"""What the commands do, as functions for Python; `edge_client.plan` and its like are these.

plan        what every cut would take; which is best
plan_chain  the best cuts along a chain of servers
plan_generation the same of a language model, called token by token; a plan of a generation as a page
profile    where time, memory and energy go, on both sides
sweep       every cut measured
prune       which channels are worth sending
calibrate  what every codec costs in answers
learn      a codec for one cut, trained
leakage    what an attacker reads from what crosses
export     heads as ONNX files
engines    heads in other engines, timed and asked
bench      a server under an open load
hierarchy  the module tree, what ran of it, ONNX files
layers     a model's layers, and where it can be cut
verify     every cut against the whole model
planned, planned_generation, swept, pruned, calibrated, benched   what these return
subject     what people have - a name, a file, a module, arrays - as a model with inputs

Each takes a server first where it takes one (None: the default of `edge_client.settings`; "own": one that is started
here), then a model, then inputs. Each shows its progress on standard error unless ``progress=False``, prints nothing,
and returns a dataclass. May import all of the client but its command line.
"""
