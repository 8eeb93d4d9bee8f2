"""Accuracy without labels: a calibrator learned from labelled documents, and its predictions."""
