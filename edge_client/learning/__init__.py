"""Train codecs, and attacks that reconstruct inputs, at a cut. Nothing here talks to a server.

examples   what crosses a cut for many inputs, and the rest of the model behind it, with gradients
training   an encoder and a decoder that preserve the model's answers
inversion  decoders that reconstruct the inputs, and their scores: SSIM, PSNR, tokens
"""
