"""A conversation that is continued in two ways; both share everything up to the fork."""

from radixkv import LLM, Chat, SamplingParams

short = SamplingParams(temperature=0.0, max_tokens=60)
chat = Chat(LLM(), system="You are a patient teacher.", sampling_params=short)
print(chat.send("Explain in two sentences what a tree is, to a programmer."))
other = chat.fork()
for branch, question in ((chat, "Now to a gardener."), (other, "Now to a child.")):
    print(f"\n{question}")
    for piece in branch.stream(question):
        print(piece, end="", flush=True)
    output = branch.last_output
    print(f"\n[{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens reused]")
