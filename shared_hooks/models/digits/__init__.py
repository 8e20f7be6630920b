"""The shipped model: a small residual network for handwritten digits, with trained weights and real test images.

network  the network (`digits`)
train    trains the shipped weights (weights.safetensors), and writes the images
export   the digits as PNG files

digits.toml is the model's spec.
"""
