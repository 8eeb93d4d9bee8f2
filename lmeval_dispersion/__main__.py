"""``python -m lmeval_dispersion`` is ``dispersion``; also what ``accelerate launch -m`` starts."""

import sys

from lmeval_dispersion.cli import main

if __name__ == "__main__":
    sys.exit(main())
