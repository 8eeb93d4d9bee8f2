"""Does G order checkpoints? A population of small models made to be hard on it, made anew by one command."""
