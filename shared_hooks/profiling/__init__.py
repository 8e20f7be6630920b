"""Layers and cuts measured, kept in a file.

profiler, profile, profile_file  measures; the result; kept
around, whole, timers            the parts of a measurement
threads                          whether torch's threads pay
inspection, machine, kind        what was measured, and on what
power, quartiles                 what is computed from it
decoding                         the same of a model that is called step by step
options, fields                  what was asked for; values read from a file

May import wrapped, planning, models, crossing, metrics, config, modules, tensors, errors.
"""
