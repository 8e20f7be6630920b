"""Channel selection: what is captured, scored, masked, pruned and served."""
