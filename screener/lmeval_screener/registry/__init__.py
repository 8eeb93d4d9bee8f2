"""Screenings kept in SQLite, what changed since, and the command ``dispersion registry``."""
