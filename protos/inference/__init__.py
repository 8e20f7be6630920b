"""The Open Inference Protocol's messages (`inference.proto`)."""
