"""Beams are forks: a step costs a few block-table entries, not a copy of the prompt."""

from radixkv import LLM, BeamSearchParams

llm = LLM()
(result,) = llm.beam_search("The best thing about a library is", BeamSearchParams(beam_width=4, max_tokens=20))
for beam in result.sequences:
    print(f"{beam.cum_logprob:7.2f}  {beam.text}")
