"""Measure layers and cuts, and store the results in a file.

profiler      measures one side
profile       the result, and its file
timers        one head, tail or whole forward: time, memory, multiplications
machine       the machine that was measured
decoding      the same for a language model, called step by step

May import wrapped, planning, models, crossing, metrics, config, modules, tensors, errors.
"""
