"""The rules as values: policies, which ops they may name, rows and tables of them, and the file that a table is."""
