"""What several benches share.

::

    figures.py, tables.py   results: in files, where folders.py leaves out those of the machine; and in the terminal
    machine.py              where they were measured
    timing.py, percentiles.py                         how short calls are timed; what is given beside the median
    process.py              what a process has used and holds
    words.py                what prompts are made of where it does not matter
"""
