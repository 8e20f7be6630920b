"""A language model, split, behind the protocol that applications speak: ``edge-client serve`` (docs/serving.md).

app        the endpoint: routes, keys, streams, cancellation
protocol   OpenAI's JSON: requests checked, answers and errors written
chats      copies of the model that share weights, one for each chat at a time; states kept for the next turn
sampling   one token chosen: penalties, grammar, temperature, by a generator of the request's own

May import generation, client.
"""
