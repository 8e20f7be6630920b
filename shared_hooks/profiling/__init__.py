"""Profiles: where the time, memory and energy of one side go, layer by layer and cut by cut, in a file."""
