"""A stranger and a server: attacks written by hand, and mutated frames in bulk. See docs/security.md."""
