"""`Chat`: a conversation in which every turn reuses all that came before it."""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.llm import LLM
from radixkv.outputs import RequestOutput
from radixkv.prompts import encode_rendered, render_chat
from radixkv.sampling_params import SamplingParams


class Chat:
    """A conversation with a model.

    The conversation is kept as token ids. The next turn's prompt is those ids, the model's own answer exactly as it was
    generated, and the tokens of what the chat template adds; so all of it is found in the cache. (Rendering and
    tokenizing the whole text anew would often give other tokens for the answer, and lose it.)

    Args:
        llm: the model.
        system: the system prompt; None: the chat template's own, if it has one.
        sampling_params: for turns that are sent without; by default up to 512 tokens, greedily.
        cache_salt: share cached prefixes only with conversations of the same salt.
    """

    def __init__(
        self,
        llm: LLM,
        system: str | None = None,
        sampling_params: SamplingParams | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self._llm = llm
        self._sampling_params = sampling_params or SamplingParams(temperature=0.0, max_tokens=512)
        self._cache_salt = cache_salt
        self._messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self._token_ids: list[int] = []
        self._rendered = ""
        # The request of the last answer as it finished, and how many tokens it generated.
        self.last_output: RequestOutput | None = None
        self.last_num_tokens = 0

    @property
    def history(self) -> list[dict[str, str]]:
        """A copy of all messages so far: system, user and assistant in turn."""
        return [dict(message) for message in self._messages]

    def send(self, text: str, sampling_params: SamplingParams | None = None) -> str:
        """Send a message and return the whole answer."""
        return "".join(self.stream(text, sampling_params))

    def stream(self, text: str, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Send a message and yield the answer as it is generated.

        The turn joins the conversation when the answer is complete: leaving the iteration early, or an error, leaves the
        conversation as it was. `last_output` then holds how many tokens were reused, and the times.

        Raises:
            TypeError: ``text`` is no string.
            ValueError: parameters ask for several answers, or the conversation is longer than the model takes.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected a string, got {text!r:.80}")
        params = sampling_params or self._sampling_params
        if params.n != 1:
            raise ValueError(f"a conversation has one answer per turn, got n={params.n}")
        return self._stream(text, params)

    def fork(self) -> Chat:
        """A second conversation that goes on from here; both share what has been computed."""
        other = Chat(self._llm, None, self._sampling_params, self._cache_salt)
        other._messages = self.history
        other._token_ids = list(self._token_ids)
        other._rendered = self._rendered
        return other

    def _stream(self, text: str, params: SamplingParams) -> Iterator[str]:
        loaded = self._llm.engine.loaded
        messages = [*self._messages, {"role": "user", "content": text}]
        rendered = render_chat(messages, loaded)
        if rendered.startswith(self._rendered):
            prompt_ids = self._token_ids + encode_rendered(rendered[len(self._rendered) :], loaded)
        else:  # a template that writes earlier turns anew, such as one that drops old reasoning
            prompt_ids = encode_rendered(rendered, loaded)
        prompt = {"prompt_token_ids": prompt_ids, "cache_salt": self._cache_salt}
        answer, answer_ids = "", []
        for output in self._llm.stream(prompt, params):
            (part,) = output.outputs
            answer += part.text
            answer_ids += part.token_ids
            self.last_output, self.last_num_tokens = output, len(answer_ids)
            if part.text:
                yield part.text
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        self._token_ids = prompt_ids + answer_ids
        self._rendered = rendered + loaded.require_tokenizer().decode(answer_ids, skip_special_tokens=False)
