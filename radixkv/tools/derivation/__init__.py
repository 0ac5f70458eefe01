"""Derives how a model writes calls from its chat template, which writes earlier calls of a conversation in that form.

::

    derived_form.py    the form, from how answers with one call and with several differ
      notations.py     how arguments are written, from how calls with different arguments differ
      segments.py      where texts differ, without cutting a tag
      probes.py        conversations whose parts are known, as the template writes them
    reading.py         whether a form reads what the template writes
"""
