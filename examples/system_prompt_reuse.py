"""Many users, one system prompt: it is computed for the first of them only."""

from radixkv import LLM, SamplingParams

SYSTEM = "You are the assistant of a small public library. Answer in one sentence. " * 10
QUESTIONS = ["When do you open?", "May I bring my dog?", "Do you have a printer?"]

llm = LLM()
conversations = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": q}] for q in QUESTIONS]
for output in llm.chat(conversations, SamplingParams(temperature=0, max_tokens=32)):
    print(
        f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens reused: {output.outputs[0].text}"
    )
