"""Tokens: the words of T and R, a task's answers, and their rows in a vocabulary."""
