"""The cloud process of Isthmus: receives what crosses a cut, runs the tail of the model, answers with its output.

core        the server without its transport: frames in, frames out
inference   the Open Inference Protocol, each request a stream of its own
streams     one client's stream; the link probed
requests    requests on their way, and how each ends
models      the tail of a model; its profile
work        threads that compute
processes   worker processes, in which tails are computed
wire        frames that answer no request
transport   gRPC, with health and reflection
cluster     replicas on many machines, and fronts before them: Ray Serve
access      who calls, and what one may
telemetry   the server seen from outside
doctor      would it serve, and be safe?
limits      every bound in one place
scale       how many replicas of it
addresses   where it listens, and who reaches that
arguments   the command lines
config, options, cli   what is served and how: TOML file and command line
"""
