"""``python -m meshwright``: the command, where its script is not on the path."""

import sys

from meshwright import main

if __name__ == "__main__":
    sys.exit(main())
