"""Derives how a model writes calls and thoughts from its chat template, which writes a conversation's earlier ones alike.

::

    derived_form.py    the form, from how answers with one call and with several differ
      notations.py     how arguments are written, from how calls with different arguments differ
      segments.py      where texts differ, without cutting a tag
      probes.py        conversations whose parts are known, as the template writes them
    thoughts.py        the tags of reasoning, from how answers with thoughts and without differ
    reading.py         whether a form reads what the template writes
"""
