"""Layers and cuts measured, kept in a file.

profiler      measures
profile       the result
profile_file  ... kept
timers        one head, tail or whole forward, timed
machine       on what it was measured
decoding      the same of a model that is called step by step

May import wrapped, planning, models, crossing, metrics, config, modules, tensors, errors.
"""
