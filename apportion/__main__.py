"""`python -m apportion`: the same as the command `apportion`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
