"""The ``mpamp`` command. Needs the extra ``cli``; nothing in the library imports it."""
