"""Generation across a cut: models that are called again and again and keep a state between the calls."""
