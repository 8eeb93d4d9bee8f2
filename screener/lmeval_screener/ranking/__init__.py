"""What was measured of a checkpoint, the groups that may be compared, their order, and what moves it.

Its modules are private.
"""
