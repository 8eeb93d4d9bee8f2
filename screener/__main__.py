"""``python -m screener`` is ``screen-checkpoints``."""

import sys

from screener.cli import main

if __name__ == "__main__":
    sys.exit(main())
