"""What a model that is called step by step takes, block by block: a decode step and a prefill, by the number of tokens.

profile  one side's numbers, by block, kept as JSON; prompts of any length
measure  the profile of the model on this machine
"""
