"""The cloud process of Isthmus: takes what crosses a cut, runs the tail of the model, answers with its output.

core, books           the life of streams and requests, no transport
hub, outlet           what a stream asks of the server, and what a request asks of its stream
session, uploads      one stream: frames in, frames out
probe, profiles, load  what a link carries, where a model's time goes here, how busy it is
engine, served_model  the tail of a model, and the torch implementation of it
servicer, server      the core behind gRPC, with health and reflection
config, cli           what is served and how: TOML file and command line
"""
