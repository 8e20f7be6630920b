"""Gathers what a plan needs: the link, the server's profile, our own.

gather    all of it together
learnt    what a server takes to decode what a calibration learnt to encode
loaded    a model with an input to plan on
loading   ... from words: its inputs, a cut of it

May import core, probing, planning, process, transport, screen.
"""
