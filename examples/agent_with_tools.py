"""An agent: the model calls functions until it can answer."""

import json

from radixkv import LLM, SamplingParams


def add(a: int, b: int) -> int:
    return a + b


NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Add two numbers", "parameters": PARAMETERS}}
FUNCTIONS = {"add": add}

llm = LLM()
params = SamplingParams(temperature=0, max_tokens=60)
messages = [{"role": "user", "content": "What is 3 plus 4?"}]
choice = "required"  # a model this small rarely decides for a call by itself
for _ in range(5):
    (output,) = llm.chat(messages, params, use_tqdm=False, tools=[ADD], tool_choice=choice, parallel_tool_calls=False)
    answer = output.outputs[0].answer
    messages.append(answer.as_message())
    print(f"[{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens reused]")
    if not answer.tool_calls:
        print(answer.text)
        break
    for call in answer.tool_calls:
        result = FUNCTIONS[call.name](**json.loads(call.arguments))
        print(f"{call.name}({call.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    choice = "auto"
