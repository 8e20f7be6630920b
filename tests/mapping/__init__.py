"""The hierarchy map and what comes of it."""
