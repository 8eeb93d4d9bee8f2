"""Token sets, vocabularies, and the rows that a set has in a vocabulary."""
