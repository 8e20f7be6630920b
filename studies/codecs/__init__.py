"""What codecs save and what they lose, on trained models: digits, frames of a moving scene, sentence embeddings."""
