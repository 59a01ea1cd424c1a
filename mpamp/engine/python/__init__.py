"""The engine in Python: a kernel written from each schema of an op, at the Autocast keys and where transforms start."""
