"""What is trained at a cut: codecs, and attacks that read inputs from what crosses. Nothing here talks to a server.

examples   what crosses a cut for many inputs, and the rest of the model behind it, with gradients
training   an encoder and a decoder that leave the model's answers as they are
inversion  decoders that try to give back the inputs, and what they reach: SSIM, PSNR, tokens
"""
