"""JSON schemas rewritten with keywords that llguidance's compiler supports, where it refuses those of the standard.

::

    prepare.py              a whole schema: limits, what is rewritten, what is refused
      references.py         what `$ref` leads to; unsatisfiable.py: that nothing satisfies it
      endless.py            parts that only an endless value satisfies
      alternatives.py       oneOf
      names.py              propertyNames, patternProperties
      numbers.py            bounds and other numbers that the compiler cannot hold
      patterns.py           regular expressions; formats.py: formats of strings
      unique.py             uniqueItems
"""
