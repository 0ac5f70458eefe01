"""`radixkv warm`: prompts computed ahead of time, and stored where a server finds them."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from radixkv.cli.options import Model, command_line_fields, with_options_of
from radixkv.config import EngineConfig, ModelConfig
from radixkv.extras import needing_extra
from radixkv.llm_options import LLMOptions

if TYPE_CHECKING:
    from radixkv.llm import LLM
    from radixkv.prompts import Prompt
    from radixkv.server.access.tenants import Tenant

# Options of answers, which are not read here, and of a tier that ends with this process.
_WITHOUT_EFFECT = frozenset(
    {
        "reasoning_parser",
        "generation_config",
        "override_generation_config",
        "async_scheduling",
        "seed",
        "speculative_config",
        "host_cache_size",
    }
)
_OPTIONS = tuple(name for name in command_line_fields((ModelConfig, EngineConfig)) if name not in _WITHOUT_EFFECT)
# What a line has one of.
_FORMS = frozenset({"prompt", "messages"})
# How long storing what was computed may take.
_STORE_SECONDS = 600.0


@with_options_of(ModelConfig, EngineConfig, only=_OPTIONS)
def warm(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="prompts, one line of JSON each")],
    model: Model = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="API key of the tenant that will use the prompts; leave it out if the server has no keys"),
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(help="the server's file of keys; --api-key may then be the name of a key in it"),
    ] = None,
    **options: Any,
) -> None:
    """Compute prompts and store them in --disk-cache or --shared-cache, for servers that start later or share the store.

    A line is JSON: "TEXT", in quotes, {"prompt": "TEXT"} or {"messages": [...]}, with "cache_salt" where requests bring one.
    """
    given = LLMOptions(**options)  # type: ignore[typeddict-item]
    if given.get("disk_cache") is None and given.get("shared_cache") is None:
        raise ValueError("disk_cache: expected a folder, or a shared_cache, in which to store what is computed")
    if given.get("disk_cache_read_only"):
        raise ValueError("disk_cache_read_only: expected false, to store what is computed")
    with needing_extra("server"):  # tenants are the server's
        from radixkv.server.run import namespaces_secret
    from radixkv.llm import LLM

    tenant = tenant_of(api_key, keys_file, namespaces_secret(given))
    with LLM(model, **given) as llm:
        prompts = read_prompts(llm, file, tenant)
        warm_prompts(llm, prompts)
        num_tokens, num_lacking = count_stored(llm, prompts)
    if num_lacking:
        raise OSError(
            f"{num_lacking} of {len(prompts)} prompts are not stored, or not whole: the reasons are above, or what is stored "
            "needs more space than it has (disk_cache_size)"
        )
    print(f"prompts stored: {len(prompts)}; tokens of them that requests find: {num_tokens}")


def tenant_of(api_key: str | None, keys_file: Path | None, secret: bytes | None) -> Tenant:
    """The tenant as a server names it.

    Args:
        api_key: its key, or the key's name in the file; None: the server has no keys.
        keys_file: where the server has the key from; None: from its command line or configuration.
        secret: of the tenants' namespaces.

    Raises:
        OSError: the file cannot be read.
        ValueError: the key is not in it.
    """
    from radixkv.server.access.keys import read_keys_file
    from radixkv.server.access.tenants import Tenants
    from radixkv.server.errors import ApiError

    if keys_file is None:
        tenants = Tenants([] if api_key is None else [api_key], secret=secret)
        return tenants.anonymous_tenant() if api_key is None else tenants.by_api_key(api_key)
    tenants = Tenants(keys=read_keys_file(keys_file), secret=secret)
    try:
        return tenants.selected_by_admin(api_key)
    except ApiError as error:
        raise ValueError(f"{error} (keys_file: {keys_file})") from None


def read_prompts(llm: LLM, file: Path, tenant: Tenant) -> list[Prompt]:
    """The prompts of a file, as a server would make them for a tenant.

    Raises:
        ValueError: a line is none of the forms, no prompt that a server would accept, or too short to be stored; the message
            names the file and the line. Or there is no prompt.
    """
    prompts = []
    # As bytes, so that a line that is not UTF-8 is named, too.
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                prompts.append(_prompt_of(llm, line, tenant))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{file}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"file: expected prompts, one line of JSON each, got none in {file}")
    return prompts


def _prompt_of(llm: LLM, line: bytes, tenant: Tenant) -> Prompt:
    from radixkv.prompts import as_chat_prompts, as_prompts

    shown = f"{line.decode(errors='backslashreplace'):.80}"
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON (a text in quotes), got {shown}: {error}") from None
    content = {"prompt": content} if isinstance(content, str) else content
    if not isinstance(content, dict) or len(_FORMS & content.keys()) != 1:
        raise ValueError(f'expected a text, {{"prompt": ...}} or {{"messages": ...}}, got {shown}')
    unknown = content.keys() - _FORMS - {"cache_salt"}
    if unknown:
        raise ValueError(
            f"{min(unknown)}: unknown; expected prompt or messages, and cache_salt where requests bring one"
        )
    salt = content.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt: expected a text that is not empty, got {salt!r:.80}")
    namespace, loaded = tenant.namespace(salt), llm.engine.loaded
    if "prompt" in content:
        prompts = as_prompts({"prompt": content["prompt"], "cache_salt": namespace}, loaded)
    else:
        prompts = as_chat_prompts(content["messages"], loaded, namespace, None)
    if len(prompts) != 1:
        raise ValueError(f"messages: expected one conversation, got {len(prompts)}")
    tokens = llm.engine.request_factory.validate_prompt(prompts[0].token_ids)
    block_size = llm.engine.cache.block_size
    if tokens.size < block_size:
        raise ValueError(
            f"prompt_token_ids: a prompt of length {tokens.size} is shorter than a block of {block_size} tokens, "
            "and cannot be stored"
        )
    return prompts[0]


def warm_prompts(llm: LLM, prompts: list[Prompt]) -> None:
    """Compute prompts and store them."""
    from radixkv.sampling_params import prompt_only_params

    params = prompt_only_params()
    given: list[Any] = [
        {"prompt_token_ids": list(prompt.token_ids), "cache_salt": prompt.namespace} for prompt in prompts
    ]
    tiers, cache = llm.engine.tiers, llm.engine.cache
    assert tiers is not None
    until = time.monotonic() + _STORE_SECONDS
    # What is evicted is stored only as far as a queue has room for it. So each batch is stored before the next evicts it.
    most = cache.num_blocks * cache.block_size // 2
    while given:
        num_tokens = itertools.accumulate(len(each["prompt_token_ids"]) for each in given)
        count = max(1, sum(total <= most for total in num_tokens))
        llm.generate(given[:count], params, use_tqdm=False)
        tiers.write_hot(lambda: until - time.monotonic())
        tiers.flush(until - time.monotonic())
        del given[:count]


def count_stored(llm: LLM, prompts: list[Prompt]) -> tuple[int, int]:
    """How many tokens of prompts a server would find in the tiers, and how many prompts lack a whole block there.

    The last token of a prompt does not count: it is always computed.
    """
    from radixkv.cache.tokens import encode

    tiers, size = llm.engine.tiers, llm.engine.cache.block_size
    assert tiers is not None
    num_tokens = num_lacking = 0
    for prompt in prompts:
        length = len(prompt.token_ids)
        found = sum(below.num_tokens for below in tiers.find(encode(prompt.token_ids), prompt.namespace, 0))
        num_tokens += found
        num_lacking += found < min(length // size * size, length - 1)
    return num_tokens, num_lacking
