"""Gathers what a plan needs: the link, the server's profile, our own.

prober    rounds of bytes on a stream of their own
probing   what the link carries; the server's profile
gather    all of it together
learnt    what a server takes to decode what a calibration learnt to encode
verified  every cut through the link, against the whole model on both sides
loaded    a model with an input to plan on
loading   ... from words: its inputs, a cut of it

May import client, planning, process, transport, screen.
"""
