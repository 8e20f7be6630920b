"""Protobuf packages of Isthmus, one folder per version."""
