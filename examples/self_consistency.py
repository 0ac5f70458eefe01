"""Self-consistency (Wang et al. 2023): sample many reasoning paths and vote. The few-shot prompt is computed once."""

import re
from collections import Counter

from radixkv import LLM, SamplingParams

PROMPT = """Q: There are 3 cars and 2 more arrive. How many cars are there?
A: There were 3 cars. 2 more came. 3 + 2 = 5. The answer is 5.

Q: Leah had 32 sweets and her sister had 42. They ate 35. How many are left?
A: Together they had 32 + 42 = 74. They ate 35. 74 - 35 = 39. The answer is 39.

Q: Anna had 4 apples. She bought 3 more. How many apples does she have?
A:"""

llm = LLM(seed=1)
params = SamplingParams(n=16, temperature=0.7, max_tokens=48, stop=["\n"])
output = llm.generate(PROMPT, params, use_tqdm=False)[0]
answers = [re.search(r"The answer is (\d+)", sample.text) for sample in output.outputs]
votes = Counter(answer.group(1) for answer in answers if answer is not None)
for answer, count in votes.most_common():
    print(f"{count:3} votes for {answer}")
computed = llm.inspect().stats["computed_tokens"]
print(f"{computed} prompt tokens computed for {len(output.outputs)} reasoning paths")
