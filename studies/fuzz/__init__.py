"""Random models, cut everywhere: programs, their source, and a judge. See docs/results/fuzzing.md."""
