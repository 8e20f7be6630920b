"""What takes hours or measures: benchmarks, experiments, fuzzing, attacks, the library of models. Uses tests.zoo."""
