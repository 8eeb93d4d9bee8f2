"""``dispersion race``: from a screened list to its best checkpoint. Its modules are private."""
