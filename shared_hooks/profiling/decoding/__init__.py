"""What a model that is called step by step takes, block by block: a decode step and a prefill, by the number of tokens.

line     a number that grows with the tokens
profile  one side's numbers
file     kept as JSON
prompts  of any length
blocks   which modules are the decoder's blocks
looking  what is not a time: weights, what is kept, what crosses
measure  the profile of the model on this machine
"""
