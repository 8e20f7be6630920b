"""What a model that is called step by step takes, block by block: a decode step and a prefill, by the number of tokens.

line     a number that grows with the tokens
profile  one side's numbers
file     kept as JSON
"""
