"""The wire format and the code generated from it; `python -m protos.generate` makes that code again."""
