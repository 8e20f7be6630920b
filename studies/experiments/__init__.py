"""Experiments: predictions and moving cuts on a link shaped in the kernel and an edge held to a quarter of a core."""
