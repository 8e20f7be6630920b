"""Which codec every tensor of a request travels with, where the user leaves that open: ``codec="auto"``.

chooser    `Chooser`: of one client; it measures, picks, learns from answers
beginning  made of what a client says

May import planning; of the engine codecs and crossings.
"""
