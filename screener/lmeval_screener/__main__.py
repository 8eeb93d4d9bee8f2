"""``python -m lmeval_screener`` is ``screen-checkpoints``."""

import sys

from lmeval_screener.cli import main

if __name__ == "__main__":
    sys.exit(main())
