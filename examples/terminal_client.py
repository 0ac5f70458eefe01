"""Talk to a server from the terminal: start `radixkv serve`, then `python terminal_client.py [URL [API_KEY]]`."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key=sys.argv[2] if len(sys.argv) > 2 else "none needed")
model = client.models.list().data[0].id
messages: list[dict[str, str]] = []
print(f"{model} at {url}; Ctrl-D ends the conversation", end="")

while True:
    try:
        messages.append({"role": "user", "content": input("\n> ")})
    except EOFError:
        break
    answer = ""
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=100, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            answer += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            reused = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n[{reused} of {chunk.usage.prompt_tokens} prompt tokens reused]")
    messages.append({"role": "assistant", "content": answer})
