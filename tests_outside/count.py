"""Counts frameworks' own programs: ``python tests_outside/count.py [--write] [NAME ...]``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root))  # this checkout, not an installed one

    from witnesses.counting import main

    sys.exit(main(sys.argv[1:]))
