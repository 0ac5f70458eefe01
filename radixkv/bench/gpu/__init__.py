"""How long a GPU takes for attention and whole steps, against what it could do at best; and a GPU's first light.

::

    first_light.py          all of it, in order of importance: first_light_parts.py, each in a part_process.py
    ready.py                what a first light needs of a machine
    layer.py                one layer's problem: attention.py, beside torch's own: torch_attention.py; tiles.py
    decode.py               whole steps of a model: decode_drafts.py: with drafts
    host_tier.py            first tokens of prompts that lie in host memory
    plan.py                 what planning costs the host
    limits.py, targets.py   what this GPU can do at most, and how near to it rows should come
    timing.py, report.py    how work is timed, and its rows are kept
"""
