"""The shipped model: a small residual network for handwritten digits, its trained weights and real test images.

network.py          the network (`digits`)
data.py             scikit-learn's digits as 32x32 gray images, and the split into training and held-out images
train.py            trains the weights that ship here, and writes the images
digits.toml         the model spec
weights.safetensors, images/    what train.py wrote
"""
