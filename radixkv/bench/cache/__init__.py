"""What the cache's bookkeeping costs, how that grows, and whether it holds its rules under random work.

::

    bookkeeping.py          each operation, against hash_chain.py: prefix caching by a chain of block hashes
    scaling.py              how costs grow, in ordinary trees and in the worst ones
    soak.py                 random work for a given time, every rule checked
"""
