"""mpamp in the training frameworks, by one line: a module for each, none of which is imported before it is asked for."""
