"""Eight answers to one prompt: it is computed once, and its blocks are shared until the answers diverge."""

from collections import Counter

from radixkv import LLM, SamplingParams

llm = LLM(seed=7)
prompt = "Question: What colour is the sky on a clear day? Answer with one word.\nAnswer:"
params = SamplingParams(n=8, temperature=0.8, max_tokens=4, stop=["\n", "."])
answers = [sample.text.strip().lower() for sample in llm.generate(prompt, params)[0].outputs]
print(Counter(answers).most_common())
print(llm.inspect().stats)
