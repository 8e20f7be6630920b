"""Edges with other releases of torch and Python, on other processors, against one server. ``make matrix``.

models  ResNet, ViT and BERT of transformers, small, with the same weights on every machine; their specs lie beside
edges   an edge is a command that runs a Python; what it is
cell    one edge, one model: every cut through the link
table   what came of it, as text and JSON
arm64.sh  a 64-bit ARM Debian with releases of torch, emulated
"""
