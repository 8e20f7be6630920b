"""Random models, cut everywhere: programs, their source, and a judge. See docs/fuzzing.md."""
