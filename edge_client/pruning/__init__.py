"""``edge-client prune``: the data, every scoring judged on it, the service measured, a page."""
