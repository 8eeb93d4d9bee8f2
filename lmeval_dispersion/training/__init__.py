"""Training: dispersion losses for any loop, and a race of the saves while they are made.

``losses``, ``RaceCallback`` and the names in :mod:`lmeval_dispersion` are public. The modules are private.
"""

from lmeval_dispersion.training.race_callback import RaceCallback as RaceCallback
