"""The workloads of ``mpamp bench``, and how they are timed. Nothing in the library imports it.

timing, counts   variants in turns, in one process; what a step runs, and its peak memory
nets, sizes      the models, and how large they are on a card, on a processor and in a test
workloads        what there is to infer and to train
precisions       float32, lower precision, torch.autocast and mpamp's regions
models           a workload in all precisions: the suites infer and train
micro            one region, one op, one scaler's step: the suite micro
growth           how cost grows with the size of a program: the suite growth
ddp              a workload on two cards
worker, engines  one process for each engine, and asking which engines there are
report, plot     JSON and PNG
"""
