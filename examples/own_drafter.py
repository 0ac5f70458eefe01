"""A drafter of your own: n-grams in ten lines. Whatever it guesses, the answer is the same; a good guess saves steps."""

from __future__ import annotations

from radixkv import LLM, SamplingParams
from radixkv.drafting import Draft, DraftContext, Drafter


class NGrams(Drafter):
    """What followed the last three tokens the last time they occurred."""

    source = "n-grams"

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        tokens = context.token_ids
        for end in range(len(tokens) - 1, 2, -1):
            if tokens[end - 3 : end] == tokens[-3:]:
                return Draft(tokens[end : end + max_tokens])
        return Draft([])


TEXT = "Repeat this: The quick brown fox jumps over the lazy dog, and the lazy dog does not mind at all.\n"


def main() -> None:
    """Answer with drafts, and print how many of their tokens were right."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    config = {"method": "tree", "num_speculative_tokens": 8, "drafters": [NGrams()]}
    llm = LLM(speculative_config=config)
    (output,) = llm.chat([{"role": "user", "content": TEXT}], params, use_tqdm=False)
    print(output.outputs[0].text)
    for source, counts in output.metrics.drafts.items():
        print(f"{source}: {counts.accepted} of {counts.drafted} drafted tokens were right")


if __name__ == "__main__":
    main()
