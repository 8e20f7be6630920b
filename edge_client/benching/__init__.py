"""Put an open load on a server: requests start on schedule, whether others are finished or not. ``edge-client bench``.

load       what is sent, when and by which client, and the results
generator  sends what is due, and measures its own lateness
gang       generators in processes of their own
light      `bench_heads`: clients without PyTorch
run        a bench's options, its rates in turn, its result
results    the figures of all rates, the knee, two benches compared, the page

Only lanes and gang load torch.
"""
