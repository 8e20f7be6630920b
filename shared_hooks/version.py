"""The version of Isthmus; the package's metadata are made of this."""

__version__ = "0.2.0.dev0"
