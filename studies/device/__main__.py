"""See `zoo`."""

import sys

from studies.device.zoo import main

if __name__ == "__main__":
    sys.exit(main())
