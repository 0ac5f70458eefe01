"""The forms in which families of models write calls of tools, one per file.

::

    base.py                   what all have in common
      tagged_arguments.py     what those with tags around each argument have in common
        qwen3_coder.py, glm.py
      hermes.py, deepseek.py, mistral.py, harmony.py, llama3_json.py, json_object.py
      python_calls.py         in Python's syntax
        python_values.py      the grammar of values there
      derived.py              one that was derived from a chat template
        heads.py              what stands before the arguments of its calls
        notation.py           its arguments as one JSON object
          elements.py         its arguments one by one
            element_syntax.py, schema_kinds.py, element_grammar.py, element_reading.py
    argument_values.py        values that stand by themselves, as text or JSON
"""
