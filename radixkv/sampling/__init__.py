"""From logits to tokens and text: sampler, exponential sampling, beam search, structured output, detokenizer."""
