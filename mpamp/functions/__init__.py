"""Functions that say how they are to be autocast: custom autograd Functions, annotated and registered ones."""
