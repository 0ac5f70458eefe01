"""Models in GGUF files: converted to folders once, or read as they are where native code computes with their blocks.

::

    conversion.py           files to folders that load fast
    model.py                the model, before its weights are read; folder.py: its folder
    fields.py, rotation.py  what transformers' converter ignores
    blocks.py               weights in their own blocks
"""
