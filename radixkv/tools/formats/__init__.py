"""The forms in which families of models write calls of tools, one per file.

::

    base.py                 what they have in common
    hermes.py, qwen3_coder.py, deepseek.py, mistral.py, harmony.py, llama3_json.py, json_object.py
"""
