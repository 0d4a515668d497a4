"""`python -m train key=value ...`."""

import sys

from specpipe.cli import main

if __name__ == "__main__":
    sys.exit(main("train"))
