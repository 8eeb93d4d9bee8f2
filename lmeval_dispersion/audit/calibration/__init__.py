"""From dispersion to accuracy: learnt from labelled slices, judged, and applied. Its modules are private."""
