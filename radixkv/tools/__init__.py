"""What an answer consists of besides its text: reasoning and tool calls.

::

    chat_format.py      the form of a model's answers, by its chat template; what one prompt's answer may hold; the parser
      derivation/       derives form and tags from the template, where it is of no known family
      formats/          the forms in which families of models write calls, one per file
        json_calls.py   reads calls as JSON objects, while they are being generated
        source.py       the text that a parser reads incrementally
        grammar.py      grammars that let an answer hold only valid calls
          closed_schema.py  schemas that allow only the arguments that they name
      reasoning.py      thoughts between tags
      template_messages.py  conversations, changed where templates do not take them as they are
      instructions.py   tools in words, for templates that do not support them
    exclusive_schemas.py  whether alternatives of a schema exclude each other; schema_values.py: which values it names
    definitions.py      tools as requests describe them
    pieces.py           the pieces of an answer, and the answer that they make
    names.py            by which options choose a form
"""
