"""What programs written for vLLM's offline API do, with the import changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.model_zoo import VOCAB_SIZE, build_shallow
from support.replica_servers import tiny_llm, tiny_model

from radixkv import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from radixkv.config import EngineConfig
from radixkv.llm_options import llm_configs
from radixkv.tools.chat_format import ChatFormat
from radixkv.vllm_options import without_vllm_options

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ROLES = "{% for message in messages %}{{ message.role }}> {{ message.content }}\n{% endfor %}bot>"
IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM(build_shallow("llama"), num_blocks=64)


@pytest.fixture(scope="module")
def worded(default_tokenizer: Any) -> LLM:
    return tiny_llm(default_tokenizer)


def tokens(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_token_ids_are_prompts(tiny: LLM) -> None:
    expected = tokens(tiny, [{"prompt_token_ids": IDS}, {"prompt_token_ids": IDS[:2]}])
    assert tokens(tiny, [IDS, IDS[:2]]) == expected
    assert tokens(tiny, IDS) == expected[:1]
    assert tokens(tiny, [TokensPrompt(prompt_token_ids=IDS)]) == expected[:1]


def test_token_ids_are_prompts_where_conversations_are_too(worded: LLM) -> None:
    (expected,) = tokens(worded, IDS)
    assert [token for piece in worded.stream(IDS, GREEDY) for token in piece.outputs[0].token_ids] == expected
    assert worded.explain([*IDS, 9]).num_prompt_tokens == len(IDS) + 1
    with pytest.raises(
        TypeError, match="prompt: expected a string, token ids, a dictionary or a list of messages, got bytes"
    ):
        worded.explain(b"text")  # type: ignore[arg-type]


def test_what_other_prompts_have_is_nothing_where_it_is_empty(worded: LLM) -> None:
    expected = tokens(worded, ["The sea", IDS])
    empty: dict[str, Any] = {"multi_modal_data": None, "mm_processor_kwargs": {}, "multi_modal_uuids": None}
    given = [
        {"prompt": "The sea", "prompt_token_ids": None, **empty},
        {"prompt_token_ids": IDS, "prompt": None, **empty},
    ]
    assert tokens(worded, given) == expected


def test_tokens_keep_the_text_that_comes_with_them(tiny: LLM, worded: LLM) -> None:
    (output,) = tiny.generate(TokensPrompt(prompt_token_ids=IDS, prompt="what they say"), GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("what they say", IDS)
    assert worded.generate(TextPrompt(prompt="The sea"), GREEDY, use_tqdm=False)[0].prompt == "The sea"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt"),
        ([["a"]], "prompt_token_ids: expected whole numbers"),
        (b"text", "prompts: expected a string, token ids, a dictionary or a list of those, got bytes"),
        ([b"text"], "prompts: expected a string, token ids or a dictionary, got b'text'"),
        ({"prompt_token_ids": IDS, "prompt": 5}, "'prompt' must be a string, got 5"),
        ({"prompt_token_ids": IDS, "multi_modal_data": {"image": 1}}, "no keys but .*got .*multi_modal_data"),
    ],
)
def test_what_is_no_prompt_is_refused(tiny: LLM, prompts: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tiny.generate(prompts, GREEDY)


def test_parameters_are_those_at_the_time_of_the_call(tiny: LLM) -> None:
    params = tiny.get_default_sampling_params()
    params.temperature, params.max_tokens, params.ignore_eos = 0.0, 6, True
    (before,) = tokens(tiny, [IDS], params)
    params.stop_token_ids = [before[2]]
    assert tokens(tiny, [IDS], params) == [before[: before.index(before[2]) + 1]]
    params.stop_token_ids = None
    params.logit_bias = {9: 100.0}
    assert tokens(tiny, [IDS], params) == [[9] * 6]
    params.max_tokens = -3
    with pytest.raises(ValueError, match="max_tokens: expected at least 1, got -3"):
        tokens(tiny, [IDS], params)


def test_an_assignment_without_effect_is_refused(tiny: LLM) -> None:
    """A misspelt field kept the default."""
    params: Any = SamplingParams(max_tokens=1)
    params.skip_clone = True  # vLLM's, which changes nothing
    params.best_of = 1  # equal to n
    tokens(tiny, [IDS], params)
    params.temperatur = 0.5
    with pytest.raises(TypeError, match=r"^sampling_params: unknown field 'temperatur'; did you mean temperature\?$"):
        tokens(tiny, [IDS], params)
    del params.temperatur
    params.output_kind = 2
    with pytest.raises(ValueError, match=r"^output_kind: expected it not to be there, got 2: LLM's calls"):
        tokens(tiny, [IDS], params)
    beams: Any = BeamSearchParams(beam_width=2, max_tokens=1)
    beams.length_penality = 0.5
    with pytest.raises(TypeError, match=r"^params: unknown field 'length_penality'; did you mean length_penalty\?$"):
        tiny.beam_search([{"prompt_token_ids": IDS}], beams)


def test_stop_strings_are_those_at_the_time_of_the_call(worded: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    text = worded.generate("The sea", params, use_tqdm=False)[0].outputs[0].text
    params.stop = [text[3:5]]
    stopped = worded.generate("The sea", params, use_tqdm=False)[0].outputs[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[3:5])], "stop")


def test_a_token_comes_first_among_its_log_probabilities(tiny: LLM) -> None:
    params = SamplingParams(temperature=2.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = tiny.generate([IDS], params, use_tqdm=False)
    (answer,) = output.outputs
    assert answer.logprobs is not None
    assert output.prompt_logprobs is not None
    assert [next(iter(entries)) for entries in answer.logprobs] == answer.token_ids
    assert [next(iter(entries)) for entries in output.prompt_logprobs[1:] if entries] == IDS[1:]
    # Tokens that are not the likeliest have a rank of their own.
    assert {next(iter(entries.values())).rank for entries in answer.logprobs} > {1}
    assert all([*entries.values()][-1].rank <= 2 for entries in answer.logprobs)


def test_minus_one_is_the_whole_vocabulary_and_no_seed(tiny: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=-1, prompt_logprobs=-1, seed=-1)
    (output,) = tiny.generate([IDS], params, use_tqdm=False)
    assert [len(entries) for entries in output.outputs[0].logprobs or ()] == [VOCAB_SIZE] * 2
    assert [len(entries or ()) for entries in output.prompt_logprobs or ()] == [0, *[VOCAB_SIZE] * 3]
    assert (params.logprobs, params.seed) == (-1, None)


def test_options_that_ask_for_nothing_else_are_taken() -> None:
    nothing: Any = None
    llm: Any = LLM(
        build_shallow("llama"),
        tensor_parallel_size=1,  # type: ignore[call-arg]
        trust_remote_code=True,
        disable_log_stats=True,
        enable_chunked_prefill=True,
        seed=nothing,
        num_blocks=8,
    )
    assert EngineConfig(seed=nothing) == EngineConfig()
    params = SamplingParams(temperature=0.0, max_tokens=2, extra_args=None, flat_logprobs=False, best_of=1)  # type: ignore[call-arg]
    assert params == SamplingParams(temperature=0.0, max_tokens=2)
    (output,) = llm.generate([IDS], params, use_tqdm=False, lora_request=None, priority=None)
    (beams,) = llm.beam_search([IDS], BeamSearchParams(1, 2), lora_request=None, concurrency_limit=None)
    assert beams.sequences[0].tokens == IDS + output.outputs[0].token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_offload_gb": 0.0, "swap_space": 0.0, "data_parallel_size": 1.0},
        {"max_seq_len_to_capture": 8192, "disable_async_output_proc": False, "preemption_mode": None},
        {"guided_decoding_backend": "auto", "enable_log_requests": False},
        {"allowed_local_media_path": "", "pooler_config": None, "enable_lora": None},
        {"max_loras": 1, "max_lora_rank": 16, "swap_space": 4, "worker_cls": "auto", "use_tqdm_on_load": True},
        {"disable_sliding_window": False, "calculate_kv_scales": False, "max_num_partial_prefills": 1},
        {"served_model_name": None, "structured_outputs_config": None},
        {"allowed_media_domains": None, "enable_prompt_embeds": False, "disable_log_stats": False},
    ],
)
def test_vllm_s_defaults_ask_for_nothing(options: dict[str, Any]) -> None:
    assert not without_vllm_options(options)


def test_vllm_s_defaults_of_parameters_ask_for_nothing() -> None:
    """They were unknown keywords, or refused, where a program writes them out."""
    of_sampling: dict[str, Any] = {
        "watermarking": None,
        "repetition_detection": None,
        "logprob_token_ids": None,
        "prompt_logprob_token_ids": None,
        "prompt_logprob_start": None,
        "routed_experts_prompt_start": 0,
        "stream_interval": None,
        "trace_decode_token_ids": None,
    }
    assert SamplingParams(**of_sampling) == SamplingParams()
    of_beams: dict[str, Any] = {"skip_special_tokens": True, "include_stop_str_in_output": False, "watermarking": None}
    assert BeamSearchParams(2, 2, **of_beams) == BeamSearchParams(2, 2)


def test_none_is_the_default_where_vllm_has_it() -> None:
    names = ("enable_prefix_caching", "generation_config", "attention_backend", "block_size")
    nothing: Any = dict.fromkeys(names)
    assert llm_configs(nothing) == llm_configs({})


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"cpu_offload_gb": False}, "cpu_offload_gb: expected 0, got False"),
        ({"enable_lora": 0}, "enable_lora: expected False or None, got 0"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: expected 1 or None, got 2: an engine runs on one device"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size: expected 1 or None, got True"),
        ({"num_gpu_blocks_override": 9}, "num_gpu_blocks_override: expected None, got 9: num_blocks"),
        ({"runner": "pooling"}, "runner: expected 'auto' or 'generate' or None, got 'pooling': models generate text"),
    ],
)
def test_other_options_are_refused_with_what_there_is(kind: Any, option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind("no model is looked for", **option)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            SamplingParams,
            {"temprature": 1},
            r"SamplingParams.__init__\(\) got .* 'temprature'. Did you mean 'temperature'",
        ),
        (
            SamplingParams,
            {"output_kind": 2},
            "output_kind: expected it not to be there, got 2: LLM's calls return whole",
        ),
        (
            SamplingParams,
            {"spaces_between_special_tokens": False},
            "spaces_between_.*: expected True, got False: texts are",
        ),
        (BeamSearchParams, {"watermarking": True}, "watermarking: expected None or False, got True: answers have no"),
        (BeamSearchParams, {"length_penalt": 1}, ".* Did you mean 'length_penalty'"),
        (StructuredOutputsParams, {"jsn": {}}, ".* 'jsn'. Did you mean 'json'"),
        (
            StructuredOutputsParams,
            {"json": {}, "whitespace_pattern": ""},
            "whitespace_pattern: expected None, got '': JSON",
        ),
    ],
)
def test_other_options_of_parameters_are_too(kind: Any, options: dict[str, Any], message: str) -> None:
    needed = {"beam_width": 2, "max_tokens": 2} if kind is BeamSearchParams else {}
    with pytest.raises(TypeError if "Did you mean" in message else ValueError, match=f"^{message}"):
        kind(**needed, **options)


def test_other_options_of_calls_are_too(tiny: LLM) -> None:
    with pytest.raises(ValueError, match=r"^lora_request: expected None, got 1: merge the adapter"):
        tiny.generate([IDS], GREEDY, lora_request=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^lora_request: expected None, got 1"):
        AsyncLLM(tiny).generate(IDS, lora_request=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^concurrency_limit: expected None, got 3: max_num_seqs"):
        tiny.beam_search([IDS], BeamSearchParams(1, 2), concurrency_limit=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^LLM.chat\(\) got .* 'chat_templat'. Did you mean 'chat_template'"):
        tiny.chat([], GREEDY, chat_templat=ROLES)  # type: ignore[call-arg]


def test_a_clone_of_parameters_shares_nothing_with_them() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop, top_k=3)
    clone = params.clone()
    assert clone == params
    stop.append("b")
    assert clone.stop == ["a"]


def test_answers_without_text(worded: LLM) -> None:
    expected = tokens(worded, "The sea")
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    (output,) = worded.generate("The sea", params, use_tqdm=False)[0].outputs
    assert ([output.token_ids], output.text) == (expected, "")
    pieces = list(worded.stream("The sea", params))
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == expected[0]
    assert not any(piece.outputs[0].text for piece in pieces)
    (answered,) = worded.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    assert (answered.outputs[0].text, answered.outputs[0].answer, len(answered.outputs[0].token_ids)) == ("", None, 6)


@pytest.mark.parametrize("stop", ["a", ["b"]])
def test_no_text_has_no_stop_string(worded: LLM, stop: Any) -> None:
    with pytest.raises(ValueError, match="stop: expected none with detokenize=False"):
        SamplingParams(detokenize=False, stop=stop)
    params = SamplingParams(stop=stop)
    params.detokenize = False
    with pytest.raises(ValueError, match="stop: expected none with detokenize=False"):
        worded.generate("The sea", params, use_tqdm=False)
    params.detokenize = 1  # type: ignore[assignment]
    with pytest.raises(TypeError, match="detokenize: expected True or False, got 1"):
        worded.generate("The sea", params, use_tqdm=False)


def test_a_call_may_bring_a_template(worded: LLM, tmp_path: Path) -> None:
    (tmp_path / "roles.jinja").write_text(ROLES)
    messages = [{"role": "user", "content": "Hi"}]
    own = worded.chat(messages, GREEDY, use_tqdm=False)[0].prompt
    for template in (ROLES, tmp_path / "roles.jinja", str(tmp_path / "roles.jinja")):
        (output,) = worded.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
        assert output.prompt == "user> Hi\nbot>"
    thinking = ROLES + "<think>{# </think> #}"
    (output,) = worded.chat(messages, GREEDY, use_tqdm=False, chat_template=thinking)
    assert output.outputs[0].answer is not None
    assert output.outputs[0].answer.reasoning == output.outputs[0].text
    assert worded.chat(messages, GREEDY, use_tqdm=False)[0].prompt == own
    for template, kind in (("nowhere.jinja", ValueError), (5, TypeError), ("{% broken", ValueError)):
        with pytest.raises(kind, match=r"chat_template|chat template"):
            worded.chat(messages, GREEDY, use_tqdm=False, chat_template=template)  # type: ignore[arg-type]


def test_a_template_needs_a_tokenizer(tiny: LLM) -> None:
    with pytest.raises(ValueError, match="chat_template: expected None, for the model has no tokenizer"):
        tiny.chat([{"role": "user", "content": "Hi"}], GREEDY, chat_template=ROLES)


def test_streams_of_conversations_take_a_template_too(default_tokenizer: Any) -> None:
    llm = tiny_llm(default_tokenizer)

    async def prompts() -> set[str | None]:
        async with AsyncLLM(llm) as engine:
            conversation = [{"role": "user", "content": "Hi"}]
            return {output.prompt async for output in engine.chat(conversation, GREEDY, chat_template=ROLES)}

    assert asyncio.run(prompts()) == {"user> Hi\nbot>"}


def test_how_answers_are_read_is_found_once_for_each_of_the_last_templates(
    default_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find the form of calls, a template renders some twenty conversations: it did so for each request that brought it."""
    llm = tiny_llm(default_tokenizer)
    found: list[str] = []
    of = ChatFormat.of

    def counted(tokenizer: Any, *parsers: Any) -> ChatFormat:
        found.append(tokenizer.chat_template)
        return of(tokenizer, *parsers)

    monkeypatch.setattr(ChatFormat, "of", counted)
    file = tmp_path / "roles.jinja"
    for text in (ROLES, ROLES, ROLES + "!"):
        file.write_text(text)
        (output,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False, chat_template=file)
        assert output.prompt == "user> Hi\nbot>" + text.removeprefix(ROLES)
    assert found == [ROLES, ROLES + "!"]


def test_a_broken_template_is_refused_when_the_model_is_loaded(default_tokenizer: Any, tmp_path: Path) -> None:
    broken = "{{ messages }}\n{% for"
    (tmp_path / "broken.jinja").write_text(broken)
    for template, where in ((broken, ""), (tmp_path / "broken.jinja", r" .*broken\.jinja,")):
        with pytest.raises(ValueError, match=rf"^chat_template:{where} line 2: expected a Jinja template: "):
            tiny_llm(default_tokenizer, chat_template=template)


def test_conversations_are_written_by_the_template_that_is_given(default_tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "roles.jinja").write_text(ROLES)
    before = default_tokenizer.chat_template
    for template in (ROLES, tmp_path / "roles.jinja", str(tmp_path / "roles.jinja")):
        llm = tiny_llm(default_tokenizer, chat_template=template)
        (output,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)
        assert output.prompt == "user> Hi\nbot>"
    assert default_tokenizer.chat_template == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"chat_template": "nowhere.jinja"},
            r"chat_template: expected a file or a Jinja template, got 'nowhere.jinja' \(No such file or directory\)",
        ),
        ({"chat_template": Path("/")}, r"expected a file or a Jinja template, got '/' \(Is a directory\)"),
        ({"chat_template": ROLES}, "chat_template: expected None, for the model has no tokenizer"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(build_shallow("llama"), **options)


def test_a_template_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes("{{ messages }} für".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"chat_template: {file}: expected UTF-8: .*0xfc"):
        LLM(build_shallow("llama"), tokenizer=None, chat_template=file)


def test_a_tokenizer_is_found_by_its_folder(default_tokenizer: Any, tmp_path: Path) -> None:
    default_tokenizer.save_pretrained(tmp_path)
    model = tiny_model(len(default_tokenizer))
    model.save_pretrained(tmp_path / "model")
    for given in (model, tmp_path / "model"):
        llm = LLM(given, tokenizer=str(tmp_path), num_blocks=8)
        assert llm.get_tokenizer().encode("The sea is") == default_tokenizer.encode("The sea is")


async def test_no_priority_is_the_default_one_in_every_call(default_tokenizer: Any) -> None:
    """Streams of an `AsyncLLM` refused it."""
    llm, params = tiny_llm(default_tokenizer), SamplingParams(max_tokens=1)
    messages = [{"role": "user", "content": "Hello"}]
    assert llm.generate(["a", "b"], params, use_tqdm=False, priority=None)[1].finished
    assert llm.chat(messages, params, use_tqdm=False, priority=None)[0].finished
    assert [output.finished for output in llm.stream("a", params, priority=None)] == [True]
    async with AsyncLLM(llm) as engine:
        for call in (engine.generate("a", params, priority=None), engine.chat(messages, params, priority=None)):
            assert [output.finished async for output in call] == [True]
        assert (await engine.beam_search("a", BeamSearchParams(2, 1), priority=None)).sequences


def test_the_best_of_as_many_as_there_are_are_all(worded: LLM) -> None:
    """As over HTTP; two of two were refused."""
    params = SamplingParams(n=2, best_of=2, max_tokens=1, seed=0)
    assert params == SamplingParams(n=2, max_tokens=1, seed=0) == params.clone()
    assert len(worded.generate("The sea", params, use_tqdm=False)[0].outputs) == 2
    for best_of in (1, 3, "2"):
        with pytest.raises(ValueError, match=f"^best_of: expected n=2 or None, got {best_of!r}"):
            SamplingParams(n=2, best_of=best_of)  # type: ignore[arg-type]
