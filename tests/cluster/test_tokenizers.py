"""An ingress writes conversations by the chat template of its replicas, and has no other tokenizer than they have."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.held_steps import HeldSteps
from support.pretended_replicas import until
from support.replica_servers import ingress_client, local_replicas, one_more, tiny_llm, tiny_model
from tokenizers import normalizers

from radixkv import LLM
from radixkv.cluster import ClusterLLM, text_interface
from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.model.tokenizer import tokenizer_digest


async def test_conversations_are_written_by_the_chat_template_of_the_new_generation(
    tmp_path: Path, default_tokenizer: Any
) -> None:
    template = "{% for message in messages %}<{{ message.role }}> {{ message.content }} <tool_call>{% endfor %}"
    other_tokenizer = copy.copy(default_tokenizer)
    other_tokenizer.chat_template = template
    conversation = {"messages": [{"role": "user", "content": "the sea"}]}
    body = {**conversation, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    async with (
        local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, (old,)),
        ingress_client(replicas, default_tokenizer) as client,
        ingress_client(replicas, default_tokenizer, chat_template=default_tokenizer.chat_template) as own,
    ):

        async def prompt(client: httpx.AsyncClient) -> str:
            response = await client.post("/tokenize", json=conversation)
            return str(default_tokenizer.decode(response.json()["tokens"]))

        async def answer() -> Any:
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            return response.json()["choices"]

        before, expected = await prompt(client), await answer()
        assert "<|im_start|>user\nthe sea" in before
        steps = await old.llm.call(HeldSteps)
        begun = asyncio.ensure_future(answer())
        steps.allow(5)
        await until(lambda: old.llm.stats.num_decoding)
        new = tiny_llm(other_tokenizer, seed=1)
        async with one_more(replicas, new, tmp_path / "new.sock", "new"):
            assert await prompt(client) == "<user> the sea <tool_call>"
            assert await prompt(own) == before
            info = await client.get("/tokenizer_info")
            assert info.json()["chat_template"] == template
            async with ingress_client(replicas, default_tokenizer) as later:
                assert await prompt(later) == await prompt(client)
            steps.allow_all()
            assert await begun == expected
            await replicas.remove("new")
        assert await prompt(client) == before


async def test_an_ingress_writes_conversations_as_its_replicas_do_unless_it_has_a_template(
    tmp_path: Path, default_tokenizer: Any
) -> None:
    """One that was started after an update, or before replicas with a template of their own, used the model's: conversations
    were written in two ways, and found nothing cached by the other.
    """
    template = "{% for message in messages %}<{{ message.role }}> {{ message.content }}{% endfor %}"
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer, chat_template=template)) as (replicas, _):
        for given, expected in ((None, template), ("{{ messages }}", "{{ messages }}")):
            config = ModelConfig(tokenizer=default_tokenizer, chat_template=given)
            loaded = text_interface(replicas, config=config)
            assert loaded.tokenizer.chat_template == expected
            llm = ClusterLLM(loaded, replicas, model_config=config)
            assert llm.loaded.tokenizer.chat_template == expected


async def test_another_tokenizer_than_the_replicas_is_refused(tmp_path: Path, default_tokenizer: Any) -> None:
    """An ingress with another version of the model's files sent wrong tokens, and answered."""
    other = copy.deepcopy(default_tokenizer)
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, _):
        with pytest.raises(ModelLoadError, match=r"^tokenizer: .*: expected the tokenizer of the replicas' LlamaFor"):
            text_interface(replicas, config=ModelConfig(tokenizer=other))
        other.save_pretrained(tmp_path / "other")
        with pytest.raises(
            ModelLoadError, match=rf"^model: {tmp_path}/other: expected the tokenizer of the replicas' "
        ):
            text_interface(replicas, tmp_path / "other")


async def test_replicas_without_a_tokenizer_take_any(tmp_path: Path, default_tokenizer: Any) -> None:
    async with local_replicas(tmp_path, LLM(tiny_model(50), num_blocks=20, block_size=16)) as (replicas, _):
        loaded = text_interface(replicas, config=ModelConfig(tokenizer=default_tokenizer))
        assert loaded.tokenizer.chat_template == default_tokenizer.chat_template


def test_tokenizers_are_told_apart_by_what_they_do(default_tokenizer: Any) -> None:
    class Slow:
        def get_vocab(self) -> dict[str, int]:
            return {"b": 1, "a": 0}

    digest = tokenizer_digest(default_tokenizer)
    default_tokenizer("sea", truncation=True, max_length=1, padding="max_length")
    assert tokenizer_digest(default_tokenizer) == digest
    assert len({digest, tokenizer_digest(None), tokenizer_digest(Slow())}) == 3
