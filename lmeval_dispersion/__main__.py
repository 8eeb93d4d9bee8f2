"""``python -m lmeval_dispersion`` is ``dispersion``; ``accelerate launch -m`` starts it too."""

import sys

from lmeval_dispersion.cli import main

if __name__ == "__main__":
    sys.exit(main())
