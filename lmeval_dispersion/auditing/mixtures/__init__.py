"""Mixtures with an exact share of right answers: their curves, and the paper's protocol on them."""
