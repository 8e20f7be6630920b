"""An open load on a server: requests begin at their times, whatever has become of others. ``edge-client bench``.

arrivals    when requests begin: by chance, evenly, or as a file says
mix         which cut, input and client each of them has
shot        one request, and what became of it
lane        what sends the requests of one client
live        ... a client that runs its heads
recorded    ... or one whose frontiers were made before: what other machines' clients would send
generator   sends what is due, and says how late it was itself
load        the instructions of one run's generators
gang        generators in processes of their own, or in this one
worker      such a process
spread      quantiles, and how far they may be off
step        the figures of one rate
results     the figures of all rates, as a file; the knee
compare     two such files side by side
page        ... and one as a page
"""
