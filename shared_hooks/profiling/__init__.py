"""Layers and cuts measured, kept in a file.

profiler      measures
profile       the result, and its file
timers        one head, tail or whole forward, timed; what it holds and multiplies
machine       on what it was measured
decoding      the same of a model that is called step by step

May import wrapped, planning, models, crossing, metrics, config, modules, tensors, errors.
"""
