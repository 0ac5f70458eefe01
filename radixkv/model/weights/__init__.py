"""A model's weights, from files into memory.

::

    paths.py                which files have them
    checkpoint.py           a folder's model: transformers_model.py: as transformers loads it; deferred.py: a module's when it
                            is packed
    mapped.py               pages of files given back once they are copied
    shared.py               packed ones, mapped by all processes of a machine
    large_pages.py          packed ones in large pages
"""
