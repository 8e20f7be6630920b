"""Gathers what a plan needs: the link, the server's profile, our own.

gather      all of it together
loading   ... from words: its inputs, a cut of it

May import core, probing, planning, process, transport, screen.
"""
