"""`python -m aioarena`."""

import sys

from aioarena.cli import main

if __name__ == "__main__":
    sys.exit(main())
