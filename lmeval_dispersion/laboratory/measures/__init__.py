"""What the laboratory computes of numbers that are at hand, without a model. Its modules are private."""
