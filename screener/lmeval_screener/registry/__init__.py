"""Screenings kept in SQLite, changes between them, and the command ``dispersion registry``."""
