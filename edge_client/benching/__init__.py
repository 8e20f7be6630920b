"""An open load on a server: requests begin at their times, whatever has become of others. ``edge-client bench``.

load       what one run's generators are to send, and when
page       the result as a page
generator  sends what is due, and says how late it was itself
gang       generators in processes of their own, or in this one
worker     such a process
results    the figures of all rates, the knee, and two benches compared
"""
