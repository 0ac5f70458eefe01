"""What an answer consists of besides its text: reasoning and tool calls.

::

    chat_format.py      how a model writes its answers, by its chat template; what follows for a prompt; the parser
      formats/          the forms in which families of models write calls, one per file
        json_calls.py   calls as JSON objects, read while they are written
        source.py       the text that a parser reads incrementally
        grammar.py      grammars that let an answer hold only valid calls
      reasoning.py      thoughts between tags
      instructions.py   tools in words, for templates that know none
    definitions.py      tools as requests describe them, answers with calls
    events.py           an answer piece by piece
"""
