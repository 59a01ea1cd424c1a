"""mpamp in the training frameworks, by one line: a module for each, not imported before it is asked for."""
