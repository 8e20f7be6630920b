"""A sweep over other people's models: transformers, timm, torchvision, small and with random weights, cut everywhere.

`python -m studies.library` runs it; see `__main__`.
"""
