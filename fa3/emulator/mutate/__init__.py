"""Proof by mutation: faults are planted in the compiled kernels one by one, and the checker has to name each.

    operators.py   enumerate the mutants of a program (mbarriers, warpgroups, cursors, bounds; edits, analysis)
    problems.py    small problems on which every changed statement decides something
    campaign.py    runs the mutants under the checkers; dataflow.py tells which blocks the GEMMs read
    judge.py       which kinds and lines are right; trace.py tells what a statement has to do with
    table.py       the results as JSON and Markdown; survivors.py the list of those that do no harm

`python -m fa3.emulator.mutate` runs them all and writes the table.
"""
