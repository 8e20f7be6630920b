"""What `EdgeClient.infer` takes, made into what the model is called with.

Tensors, and whatever else a model's arguments may be, go to the model as they are. A picture, a frame, a file or its
bytes are read as the model's spec says, by its own code, so that they give what ``edge-client run`` makes of them.

reader  `InputReader`: which kind an input is
kinds   arrays, pictures, bytes; what a model does not take, and says nothing of

May import call, model_choice, screen, sources; of the engine models, tensors, errors.
"""

from edge_client.inputs.reader import TAKEN, InputReader

__all__ = ["TAKEN", "InputReader"]
