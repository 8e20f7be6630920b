"""Serve a split language model with the protocol that applications use: ``edge-client serve`` (docs/serving.md).

app        the endpoint: routes, keys, streams, cancellation
protocol   OpenAI's JSON: requests checked, answers and errors written
chats      copies of the model that share weights, one per concurrent chat; states kept for the next turn
sampling   samples a token: penalties, grammar, temperature, with the request's own generator

May import generation, client.
"""
