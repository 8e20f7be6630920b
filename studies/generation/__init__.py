"""Split generation against the same model in one process: architectures, modes of `generate()`, and what crosses.

`python -m studies.generation` runs it; see `__main__`.
"""
