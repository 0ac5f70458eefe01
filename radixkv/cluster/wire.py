"""What an ingress and its replicas exchange: a JSON object for a request, a line of JSON for each piece of its answers.

Both ends run the same version, so the fields are those of the library's own classes. Nothing here is a public interface.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from types import MappingProxyType
from typing import Any

from radixkv.cache.arguments import is_number, is_whole
from radixkv.engine.clearing import NamespaceSelection
from radixkv.errors import (
    EngineDeadError,
    EngineError,
    PromptTooLongError,
    QueueFullError,
    StepFailedError,
    StructuredOutputError,
)
from radixkv.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    DraftCounts,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from radixkv.prompts import Prompt
from radixkv.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.tools.grammar import AnswerFrame

# Request header with the hexadecimal number of an ingress: a replica announces a request to all others.
SENDER_HEADER = "radixkv-sender"
# Request header, of any value: another replica had accepted the request.
ACCEPTED_HEADER = "radixkv-accepted"

# Request header with the instance (`ReplicaDescription`) that is to answer; another one that has its address by now refuses.
INSTANCE_HEADER = "radixkv-instance"

# Errors that any replica would answer with, by name.
_LASTING: Mapping[str, type[Exception]] = MappingProxyType(
    {error.__name__: error for error in (StructuredOutputError, PromptTooLongError, ValueError, TypeError)}
)


def encode_request(prompt: Prompt, params: SamplingParams | BeamSearchParams, priority: int, tenant: str) -> bytes:
    """A request, with ``params`` from `with_answer_form`.

    The outputs in ``prompt.resume`` are sent without texts and log-probabilities, which the replica does not need.
    """
    resume = [asdict(replace(output, text="", logprobs=None, answer=None)) for output in prompt.resume]
    return _encoded(
        {
            "prompt_token_ids": prompt.token_ids,
            "namespace": prompt.namespace,
            "read_cache": prompt.read_cache,
            "write_cache": prompt.write_cache,
            "resume": resume,
            "prediction": prompt.prediction,
            "use_beam_search": isinstance(params, BeamSearchParams),
            "params": _fields_of(params),
            "priority": priority,
            "tenant": tenant,
        }
    )


def decode_request(body: bytes) -> tuple[Prompt, SamplingParams | BeamSearchParams, int, str]:
    """The prompt, its parameters, the priority and the tenant.

    Raises:
        ValueError, TypeError, KeyError: it is not an encoded request, or a parameter is impossible.
    """
    sent = json.loads(body)
    params = sent["params"]
    if params["structured_outputs"] is not None:
        frame = params["structured_outputs"]["frame"]
        structured = {**params["structured_outputs"], "frame": None if frame is None else AnswerFrame(**frame)}
        params["structured_outputs"] = StructuredOutputsParams(**structured)
    if params.get("logit_bias") is not None:
        params["logit_bias"] = {int(token_id): bias for token_id, bias in params["logit_bias"].items()}
    prompt = Prompt(
        sent["prompt_token_ids"],
        namespace=sent["namespace"],
        read_cache=sent["read_cache"],
        write_cache=sent["write_cache"],
        resume=[CompletionOutput(**output) for output in sent["resume"]],
        prediction=sent["prediction"],
    )
    kind = BeamSearchParams if sent["use_beam_search"] else SamplingParams
    return prompt, kind(**params), sent["priority"], sent["tenant"]


def private_headers(secret: str, sender: int) -> dict[str, str]:
    """The headers of every request of an ingress, whose number is ``sender``, to a replica."""
    return {"Authorization": f"Bearer {secret}", SENDER_HEADER: f"{sender:x}"}


def decode_sender(headers: Mapping[str, str]) -> int:
    """The number of the ingress that has sent a request; 0 if it does not say.

    Raises:
        ValueError: it is not a number of 64 bits.
    """
    text = headers.get(SENDER_HEADER, "0")
    sender = int(text, 16)
    if not 0 <= sender < 1 << 64:
        raise ValueError(f"{SENDER_HEADER}: expected a number of 64 bits, got {text!r:.40}")
    return sender


def encode_delta(delta: RequestOutput) -> bytes:
    """A line with what is new."""
    outputs = [
        [
            output.index,
            output.text,
            output.token_ids,
            output.cumulative_logprob,
            _encode_logprobs(output.logprobs),
            output.finish_reason,
            output.stop_reason,
        ]
        for output in delta.outputs
    ]
    return _line(
        {
            "outputs": outputs,
            "finished": delta.finished,
            "num_cached_tokens": delta.num_cached_tokens,
            "prompt_logprobs": _encode_logprobs(delta.prompt_logprobs),
            **_encode_counts(delta.metrics),
        }
    )


def decode_delta(line: Mapping[str, Any], known: RequestOutput) -> RequestOutput:
    """A line as an output of the same request as ``known``, with what the replica has counted for it so far."""
    outputs = [
        CompletionOutput(index, text, token_ids, cumulative, _decode_logprobs(logprobs), finish_reason, stop_reason)
        for index, text, token_ids, cumulative, logprobs, finish_reason, stop_reason in line["outputs"]
    ]
    return replace(
        known,
        outputs=outputs,
        finished=line["finished"],
        num_cached_tokens=line["num_cached_tokens"],
        prompt_logprobs=_decode_logprobs(line["prompt_logprobs"]),
        metrics=_with_counts(known.metrics, line),
    )


def encode_scheduled() -> bytes:
    """A line that says that the prompt is being computed, which may take long."""
    return _line({"finished": False, "scheduled": True})


def is_scheduled(line: Mapping[str, Any]) -> bool:
    """Whether a line is what `encode_scheduled` wrote."""
    return "scheduled" in line


def encode_begun() -> bytes:
    """A line that says that the first step of a beam search is computed, whose result comes much later."""
    return _line({"finished": False})


def encode_beams(output: BeamSearchOutput) -> bytes:
    """The last line of a beam search."""
    beams = [
        [beam.tokens, _encode_logprobs(beam.logprobs), beam.cum_logprob, beam.finish_reason, beam.stop_reason]
        for beam in output.sequences
    ]
    return _line(
        {
            "beams": beams,
            "finished": True,
            "num_prompt_tokens": output.num_prompt_tokens,
            "num_cached_tokens": output.num_cached_tokens,
            **_encode_counts(output.metrics),
        }
    )


def decode_beams(line: Mapping[str, Any], metrics: RequestMetrics) -> BeamSearchOutput:
    """What `encode_beams` wrote, with the times of ``metrics``."""
    sequences = [
        BeamSearchSequence(tokens, _decode_logprobs(logprobs) or [], cumulative, None, finish_reason, stop_reason)
        for tokens, logprobs, cumulative, finish_reason, stop_reason in line["beams"]
    ]
    counted = _with_counts(metrics, line)
    return BeamSearchOutput(sequences, line["num_prompt_tokens"], line["num_cached_tokens"], counted)


def encode_error(error: EngineError) -> bytes:
    """A line that says why there is no further one."""
    return _line(encode_refusal(error))


def encode_refusal(error: Exception) -> dict[str, Any]:
    """Why a request was refused, or ended."""
    return {
        "error": str(error),
        "kind": type(error).__name__,
        "retry_after": error.retry_after if isinstance(error, QueueFullError) else None,
    }


def error_of(line: Mapping[str, Any]) -> Exception | None:
    """The error, if any replica would meet it; None: another replica may continue."""
    kind = _LASTING.get(line["kind"])
    return None if kind is None else kind(line["error"])


def refusal_of(sent: Mapping[str, Any]) -> Exception:
    """The error that a replica gives for a bad request, which any would refuse: a `ValueError` if its kind is not known."""
    return error_of(sent) or ValueError(sent["error"])


def has_crashed(line: Mapping[str, Any]) -> bool:
    """Whether the engine crashed while it ran the request."""
    return line["kind"] in (EngineDeadError.__name__, StepFailedError.__name__)


def encode_selection(selection: NamespaceSelection) -> bytes:
    """Which namespaces to clear."""
    return json.dumps({"name": selection.name, "derived": selection.derived}).encode()


def decode_selection(body: bytes) -> NamespaceSelection:
    """What `encode_selection` wrote.

    Raises:
        ValueError, TypeError, KeyError: it is something else.
    """
    sent = json.loads(body)
    return NamespaceSelection(sent["name"], sent["derived"])


def encode_pin(tenant: str | None, namespace: str, token_ids: Sequence[int], ttl: float | None) -> bytes:
    """A prefix to keep for so many seconds; for the administrator, who is no tenant, perhaps until it is released (None)."""
    return _encoded({"tenant": tenant, "namespace": namespace, "token_ids": token_ids, "ttl": ttl})


def decode_pin(body: bytes) -> tuple[str | None, str, list[int], float | None]:
    """What `encode_pin` was given.

    Raises:
        ValueError, TypeError, KeyError: it is something else.
    """
    sent = json.loads(body)
    return sent["tenant"], sent["namespace"], sent["token_ids"], sent["ttl"]


def encode_prompts(prompts: Sequence[Prompt], tenant: str) -> bytes:
    """Prompts to be explained: what decides whether they are cached."""
    sent = [
        {"token_ids": prompt.token_ids, "namespace": prompt.namespace, "read_cache": prompt.read_cache}
        for prompt in prompts
    ]
    return _encoded({"prompts": sent, "tenant": tenant})


def decode_prompts(body: bytes) -> tuple[list[Prompt], str]:
    """What `encode_prompts` was given.

    Raises:
        ValueError, TypeError, KeyError: it is something else.
    """
    sent = json.loads(body)
    return [Prompt(**prompt) for prompt in sent["prompts"]], sent["tenant"]


def encode_shares(shares: Mapping[str, TenantShare]) -> bytes:
    """What each tenant may have."""
    return _encoded({name: asdict(share) for name, share in shares.items()})


def decode_shares(body: bytes) -> dict[str, TenantShare]:
    """What `encode_shares` wrote.

    Raises:
        ValueError, TypeError: it is something else.
    """
    shares = json.loads(body)
    if not isinstance(shares, dict):
        raise ValueError(f"tenants: expected an object with a share for each name, got {shares!r:.80}")
    return {name: TenantShare(**share) for name, share in shares.items()}


def _encode_counts(metrics: RequestMetrics) -> dict[str, Any]:
    """The counts that are not zero: most requests have none, which keeps lines short."""
    counts: dict[str, Any] = {}
    if metrics.loaded_tokens:
        counts |= {"loaded_tokens": metrics.loaded_tokens, "load_seconds": metrics.load_seconds}
    if metrics.drafts:
        counts["drafts"] = {source: [each.drafted, each.accepted] for source, each in metrics.drafts.items()}
    return counts


def _with_counts(metrics: RequestMetrics, line: Mapping[str, Any]) -> RequestMetrics:
    """The times of ``metrics``, and what `_encode_counts` wrote."""
    loaded_tokens, load_seconds = dict(line.get("loaded_tokens", {})), line.get("load_seconds", 0.0)
    counts = dict(line.get("drafts", {})).items()
    drafts = {source: DraftCounts(drafted, accepted) for source, (drafted, accepted) in counts}
    return replace(metrics, loaded_tokens=loaded_tokens, load_seconds=load_seconds, drafts=drafts)


def _fields_of(params: SamplingParams | BeamSearchParams) -> dict[str, Any]:
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    if params.structured_outputs is not None:
        values["structured_outputs"] = asdict(params.structured_outputs)
    if isinstance(params, SamplingParams):
        values["logit_bias"] = params.biases  # whose keys are Python's integers
    return values


def _encoded(sent: Mapping[str, Any]) -> bytes:
    """JSON of arguments, which may be all that an engine accepts: numpy's numbers and arrays, and other collections."""
    return json.dumps(sent, default=_plain).encode()


def _plain(value: Any) -> Any:
    """What `json` does not know.

    Raises:
        TypeError: nor is it a number or a collection.
    """
    if is_whole(value):
        return int(value)
    if is_number(value):
        return float(value)
    if isinstance(value, Collection) and not isinstance(value, bytes):
        return list(value)
    raise TypeError(f"expected numbers, strings and collections of them, got {value!r:.80}")


def _line(piece: Mapping[str, Any]) -> bytes:
    return json.dumps(piece).encode() + b"\n"


def _encode_logprobs(logprobs: Sequence[Mapping[int, Logprob] | None] | None) -> list[Any] | None:
    """For each token, a list of its candidates; None for a prompt's first token, and where none were asked for."""
    if logprobs is None:
        return None
    return [
        None
        if entry is None
        else [(token_id, each.logprob, each.rank, each.decoded_token) for token_id, each in entry.items()]
        for entry in logprobs
    ]


def _decode_logprobs(logprobs: list[Any] | None) -> list[Any] | None:
    if logprobs is None:
        return None
    return [
        None if entry is None else {token_id: Logprob(logprob, rank, text) for token_id, logprob, rank, text in entry}
        for entry in logprobs
    ]
