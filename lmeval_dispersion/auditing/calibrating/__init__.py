"""Accuracy without labels: a calibrator fitted to labelled documents estimates other ones."""
