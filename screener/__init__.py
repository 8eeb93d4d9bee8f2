"""Zero-label checkpoint screening: rank checkpoints by the dispersion gap of their output rows."""
