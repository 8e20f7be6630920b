"""An open load on a server: requests begin at their times, whatever has become of others. ``edge-client bench``.

load       what is sent, when, by whom, and what became of it
generator  sends what is due, and says how late it was itself
gang       generators in processes of their own
light      `bench_heads`: clients without PyTorch
run        the terms of a bench, its rates in turn, what it returns
results    the figures of all rates, the knee, two benches compared, the page

Only lanes and gang load torch.
"""
