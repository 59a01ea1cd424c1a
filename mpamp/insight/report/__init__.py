"""The report of a run, as one HTML page: what is collected while a script runs, the advice, and the page.

collecting   the context manager around the script
roots, steps, scaling, clock, plain   what it listens to: models, steps op by op, scalers, time; and float32
report, advice                        what was found, as values
rendering, charts, page/              the page
"""
