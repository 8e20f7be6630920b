"""``python -m cloud_server``, and the console script ``cloud-server``."""

import sys

from cloud_server.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
