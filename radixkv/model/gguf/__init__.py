"""Models in GGUF files, each converted once: to a folder with its weights in their own blocks, or as floats.

::

    conversion.py           which folder a file becomes, and that it does so once
    model.py                the model, before its weights are read; folder.py: its folder
    fields.py, rotation.py  what transformers' converter ignores
    blocks.py               weights in their own blocks
"""
