"""What an answer consists of besides its text: reasoning and tool calls.

::

    definitions   tools as a request describes them, calls as an answer holds them
    events        an answer piece by piece: text, reasoning, the beginning of a call, its arguments
"""
