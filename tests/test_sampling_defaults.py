"""What a model's generation_config says counts where a call or a request says nothing, and nowhere else."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.in_process_server import make_client
from support.model_zoo import build_shallow
from support.replica_servers import local_replicas, tiny_llm

from radixkv import LLM, AsyncLLM, SamplingParams
from radixkv.cluster import create_ingress
from radixkv.cluster.describe import describe
from radixkv.cluster.description import ReplicaDescription
from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.model.loader import load_model
from radixkv.server.config import ServerConfig

OF_MODEL = {
    "temperature": 0.6,
    "top_k": 1,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "max_new_tokens": 7,
    "do_sample": True,
    "eos_token_id": [150],
}
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_shallow("llama").save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(OF_MODEL))
    return path


def of(params: SamplingParams) -> list[Any]:
    return [getattr(params, name) for name in FIELDS]


def defaults(folder: Path, **options: Any) -> list[Any]:
    return of(SamplingParams(**load_model(folder, ModelConfig(**options)).sampling_defaults))


def tokens(llm: LLM, params: SamplingParams | None) -> list[int]:
    return llm.generate(IDS, params, use_tqdm=False)[0].outputs[0].token_ids


def test_calls_without_parameters_take_the_model_s(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        llm = LLM(folder, num_blocks=64)
    assert "temperature 0.6, top_p 0.95, top_k 1, min_p 0.01, repetition_penalty 1.3, max_tokens 7" in caplog.text
    params = llm.get_default_sampling_params()
    assert of(params) == [0.6, 1, 0.95, 0.01, 1.3, 7]
    # top_k is 1, so that nothing depends on chance.
    likeliest = SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=7)
    assert tokens(llm, None) == tokens(llm, params) == tokens(llm, likeliest)
    streamed = [token for output in llm.stream(IDS) for token in output.outputs[0].token_ids]
    assert streamed == tokens(llm, None)
    params.top_p = 0.5
    assert of(llm.get_default_sampling_params())[2] == 0.95

    async def main() -> list[int]:
        async with AsyncLLM(llm) as engine:
            return [token async for output in engine.generate(IDS) for token in output.outputs[0].token_ids]

    assert asyncio.run(main()) == streamed


def test_given_parameters_are_used_as_they_are(folder: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    with_defaults, without = LLM(folder, num_blocks=64), LLM(folder, num_blocks=64, generation_config="vllm")
    assert tokens(with_defaults, greedy) == tokens(without, greedy)
    assert of(without.get_default_sampling_params()) == of(SamplingParams())


def test_where_they_come_from_and_what_takes_their_place(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "eos_token_id": 33}')
    neutral = of(SamplingParams())
    assert defaults(folder) == [0.6, 1, 0.95, 0.01, 1.3, 7]
    assert defaults(folder, generation_config=str(tmp_path)) == [0.25, *neutral[1:]]
    override = {"top_k": 9, "temperature": None, "max_new_tokens": None}
    for given in (override, json.dumps(override)):
        assert defaults(folder, override_generation_config=given) == [1.0, 9, 0.95, 0.01, 1.3, 16]
        assert defaults(folder, generation_config="vllm", override_generation_config=given) == [1.0, 9, *neutral[2:]]
    # End tokens are not a matter of taste.
    ends = [load_model(folder, ModelConfig(generation_config=source)).eos_token_ids for source in ("auto", "vllm")]
    assert ends == [{150}, {150}]
    assert load_model(folder, ModelConfig(generation_config=str(tmp_path))).eos_token_ids == {33}


def test_a_warning_names_fields_that_are_not_applied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers generates other tokens with them, and nothing said so."""
    build_shallow("llama").save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text('{"suppress_tokens": [5], "min_length": 30, "temperature": 0.5}')
    load_model(tmp_path)
    (warning,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.startswith(f"generation_config of {tmp_path}: min_length, suppress_tokens: not applied")
    caplog.clear()
    load_model(tmp_path, ModelConfig(generation_config="vllm"))
    path.write_text(
        '{"suppress_tokens": [], "min_length": 0, "num_beams": 1, "typical_p": 1.0, "guidance_scale": null}'
    )
    load_model(tmp_path)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_end_tokens_are_of_the_vocabulary() -> None:
    """A negative one, which some files have for none, ended answers at a token counted from the vocabulary's end."""
    model = build_shallow("llama")
    model.generation_config.eos_token_id = [2, -3, model.config.vocab_size]
    assert load_model(model).eos_token_ids == {2}


def test_a_loaded_model_has_its_own_and_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    model = build_shallow("llama")
    assert load_model(model).sampling_defaults == {}
    model.generation_config.temperature = 0.5
    assert load_model(model).sampling_defaults == {"temperature": 0.5}
    assert load_model(model, ModelConfig(generation_config=str(tmp_path))).sampling_defaults == {"temperature": 0.25}
    assert model.generation_config.temperature == 0.5


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top_p", 0, "top_p: expected more than 0.0 and at most 1.0, got 0"),
        ("temperature", "hot", "temperature: expected a number, got 'hot'"),
        ("top_k", 1.5, "top_k: expected a whole number, got 1.5"),
        ("repetition_penalty", True, "repetition_penalty: expected a number, got True"),
        ("max_new_tokens", 0, "max_tokens: expected at least 1, got 0"),
        ("temperature", float("nan"), "temperature: expected .*, got nan"),
    ],
)
def test_what_cannot_be_sampled_with_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^override_generation_config: {message}"):
        ModelConfig(override_generation_config={name: value})
    model = build_shallow("llama")
    setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=f"^generation_config of .*: {message}; generation_config='vllm' does without"):
        load_model(model)
    assert load_model(model, ModelConfig(generation_config="vllm")).sampling_defaults == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"generation_config": "nowhere"},
            "generation_config: expected auto, vllm or a folder with a .*, got 'nowhere'",
        ),
        ({"override_generation_config": "{"}, "override_generation_config: expected JSON, got '{'"),
        ({"override_generation_config": "[1]"}, "override_generation_config: expected such as .*, got \\[1\\]"),
        ({"override_generation_config": {"topk": 1}}, "override_generation_config: topk: .*did you mean top_k?"),
        ({"override_generation_config": {"max_tokens": 1}}, "max_tokens: .*did you mean max_new_tokens?"),
    ],
)
def test_other_options_are_refused_before_a_model_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(build_shallow("llama"), **options)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("no JSON")
    with pytest.raises(ValueError, match="generation_config: expected auto, vllm or a folder"):
        load_model(build_shallow("llama"), ModelConfig(generation_config=str(tmp_path)))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ("no JSON", "not a valid JSON file"),
        ("[]", "not a mapping"),
        ('{"max_new_tokens": -3}', "`max_new_tokens` must be greater than 0"),
        ('{"watermarking_config": 3}', "has no attribute"),
        ('{"eos_token_id": "</s>"}', "eos_token_id: expected a token id or a list of them, got '</s>'"),
        ('{"eos_token_id": [2, null]}', r"eos_token_id: expected a token id or a list of them, got \[2, None\]"),
        ('{"eos_token_id": true}', "eos_token_id: expected a token id or a list of them, got True"),
    ],
)
def test_a_damaged_file_is_refused_where_its_values_count(
    contents: str, reason: str, native: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was refused where they did not count, too; and with weights in memory, not even where they did."""
    build_shallow("llama").save_pretrained(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"eos_token_id": 33}')
    damaged = tmp_path / "generation_config.json"
    damaged.write_text(contents)
    with pytest.raises(
        ModelLoadError, match=f"^{damaged}: .* cannot be read .*{reason}.*; generation_config='vllm' does"
    ):
        load_model(tmp_path, native=native)
    assert load_model(tmp_path, ModelConfig(generation_config=str(other)), native=native).eos_token_ids == {33}
    assert not caplog.records
    loaded = load_model(tmp_path, ModelConfig(generation_config="vllm"), native=native)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(f"^{damaged}: it cannot be read .*{reason}.*: its end tokens are ignored", caplog.messages[0])
    assert (loaded.sampling_defaults, loaded.eos_token_ids) == ({}, {2})


def test_end_tokens_of_another_type_are_refused() -> None:
    model = build_shallow("llama")
    model.generation_config.eos_token_id = "</s>"
    with pytest.raises(ValueError, match=r"^eos_token_id: expected a token id or a list of them, got '</s>'$"):
        load_model(model)


def test_a_default_is_not_too_much_for_the_cache(folder: Path, tmp_path: Path, default_tokenizer: Any) -> None:
    """Nor is it too much when a user asks for it: an answer ends at the length that there is room for."""
    many: Any = {"num_blocks": 4, "block_size": 16, "override_generation_config": {"max_new_tokens": 400, "top_k": 1}}
    llm = LLM(folder, **many)
    asked_for = llm.get_default_sampling_params()
    assert asked_for.max_tokens == 400
    assert len(tokens(llm, None)) <= 4 * 16 + 1 - len(IDS)
    assert tokens(llm, None) == tokens(llm, asked_for)

    async def lengths(client: httpx.AsyncClient) -> int:
        response = await client.post(CHAT, json={"messages": MESSAGES, "ignore_eos": True})
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        return int(usage["total_tokens"])

    assert asked(default_tokenizer, lengths, **many) == 4 * 16 + 1
    assert asked_of_an_ingress(default_tokenizer, tmp_path, lengths, **many) == 4 * 16 + 1


MESSAGES = [{"role": "user", "content": "Hi."}]
NEUTRAL = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "seed": 3}
SERVED = {"temperature": 0.6, "top_k": 1, "top_p": 0.95, "repetition_penalty": 1.3, "max_new_tokens": 7}
# Path, body, and how many tokens the answer has; of a request that says nothing, and of one that says all.
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def asked(tokenizer: Any, ask: Any, **options: Any) -> Any:
    """What ``ask`` returns when it is called with a server over one engine."""

    async def main() -> Any:
        llm = tiny_llm(tokenizer, **options)
        async with AsyncLLM(llm) as engine, make_client(engine) as client:
            return await ask(client)

    return asyncio.run(main())


def asked_of_an_ingress(tokenizer: Any, folder: Path, ask: Any, **options: Any) -> Any:
    """What ``ask`` returns when it is called with an ingress that has one replica."""

    async def main() -> Any:
        async with local_replicas(folder, tiny_llm(tokenizer, **options)) as (replicas, _):
            ingress = create_ingress(ServerConfig(), replicas, model_config=ModelConfig(tokenizer=tokenizer))
            transport = httpx.ASGITransport(ingress, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                found = await ask(client)
            await ingress.llm.shutdown()
            return found

    return asyncio.run(main())


async def answers(client: httpx.AsyncClient) -> list[Any]:
    """Answers to requests that leave out what the model has a default for, and to some that do not."""
    wanted = {"return_token_ids": True, "ignore_eos": True}
    bodies = [
        (CHAT, {"messages": MESSAGES, **wanted}),
        (CHAT, {"messages": MESSAGES, **wanted, "temperature": None, "max_tokens": None}),
        (CHAT, {"messages": MESSAGES, **wanted, "max_completion_tokens": 5}),
        (CHAT, {"messages": MESSAGES, **wanted, **NEUTRAL, "max_tokens": 9}),
        (COMPLETION, {"prompt": "The sea", **wanted}),
        (COMPLETION, {"prompt": "The sea", **wanted, "use_beam_search": True, "n": 2}),
        (CHAT, {"messages": MESSAGES, **wanted, "use_beam_search": True, "n": 2}),
    ]
    found = []
    for path, body in bodies:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        found.append([choice["token_ids"] for choice in response.json()["choices"]])
    response = (await client.post("/v1/responses", json={"input": "Hi."})).json()
    return [*found, response["temperature"], response["top_p"], response["usage"]["output_tokens"]]


def test_requests_over_http_take_what_they_leave_out(default_tokenizer: Any) -> None:
    found = asked(default_tokenizer, answers, override_generation_config=SERVED)
    chat, nulls, shorter, explicit, completion, beams, chat_beams, temperature, top_p, num_tokens = found
    assert chat == nulls
    assert [len(chat[0]), len(shorter[0]), len(explicit[0]), len(completion[0])] == [7, 5, 9, 16]
    assert shorter[0] == chat[0][:5]
    assert (temperature, top_p, num_tokens) == (0.6, 0.95, 7)

    async def spelled_out(client: httpx.AsyncClient) -> list[Any]:
        sampling = {name: SERVED[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty")}
        wanted = {"return_token_ids": True, "ignore_eos": True}
        bodies = [
            (CHAT, {"messages": MESSAGES, **wanted, **sampling, "max_tokens": 7}),
            (CHAT, {"messages": MESSAGES, **wanted, **NEUTRAL, "max_tokens": 9}),
            (COMPLETION, {"prompt": "The sea", **wanted, **sampling}),
            (COMPLETION, {"prompt": "The sea", **wanted, "use_beam_search": True, "n": 2}),
            # As in transformers and vLLM, beams are the model's likeliest, however samples are drawn; their length counts.
            (CHAT, {"messages": MESSAGES, **wanted, "use_beam_search": True, "n": 2, "max_tokens": 7}),
        ]
        responses = [(await client.post(path, json=body)).json() for path, body in bodies]
        return [[choice["token_ids"] for choice in response["choices"]] for response in responses]

    assert asked(default_tokenizer, spelled_out) == [chat, explicit, completion, beams, chat_beams]


def test_an_ingress_answers_as_its_replicas_would(default_tokenizer: Any, tmp_path: Path) -> None:
    alone = asked(default_tokenizer, answers, override_generation_config=SERVED)
    assert asked_of_an_ingress(default_tokenizer, tmp_path, answers, override_generation_config=SERVED) == alone


async def test_replicas_that_sample_otherwise_are_of_another_generation(default_tokenizer: Any) -> None:
    async def described(**options: Any) -> Any:
        async with AsyncLLM(tiny_llm(default_tokenizer, num_blocks=8, **options)) as engine:
            return await describe(engine, "one", 0.0)

    neutral, other = await described(), await described(override_generation_config={"top_k": 5})
    assert neutral.difference(other) == "sampling_defaults: {}, and {'top_k': 5} there"
    assert neutral.generation != other.generation
    assert neutral.difference_in_prompts(other) is None
    sent = other.as_json()
    assert replace(ReplicaDescription.from_json(sent), started=other.started) == other
    sent["identity"]["sampling_defaults"]["top_k"] = "many"
    with pytest.raises(ValueError, match="top_k: expected a whole number, got 'many'"):
        ReplicaDescription.from_json(sent)
