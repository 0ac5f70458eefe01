"""OpenAI's predicted outputs: the same answer in fewer steps, and what came of the prediction in usage and metrics."""

from __future__ import annotations

from typing import Any

import pytest
from support.drafters import speculator
from support.in_process_server import served

from radixkv import LLM
from radixkv.drafting.sources import PredictionDrafter

pytestmark = pytest.mark.slow
QUESTION = {
    "model": "model",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 18,
    "temperature": 0.7,
    "seed": 4,
}


async def test_a_prediction_is_a_draft(default_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_llm.engine, "_speculator", speculator(default_llm, [PredictionDrafter()]))
    async with served(default_llm) as client:

        async def ask(**fields: Any) -> dict[str, Any]:
            response = await client.post("/v1/chat/completions", json={**QUESTION, **fields})
            answer: dict[str, Any] = response.json()
            assert response.status_code == 200, answer
            return answer

        plain = await ask()
        text = plain["choices"][0]["message"]["content"]
        assert plain["usage"]["completion_tokens_details"] == {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        }
        steps = default_llm.engine.num_steps
        parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
        predicted = await ask(prediction={"type": "content", "content": parts})
        assert predicted["choices"][0]["message"]["content"] == text
        details = predicted["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 9
        assert default_llm.engine.num_steps - steps < 12
        wrong = await ask(prediction={"type": "content", "content": "Something else altogether, of another kind."})
        assert wrong["choices"][0]["message"]["content"] == text
        assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0
        metrics = (await client.get("/metrics")).text
        assert 'radixkv:spec_decode_num_accepted_tokens_total{source="prediction"}' in metrics
        refused = await client.post("/v1/chat/completions", json={**QUESTION, "prediction": {"type": "content"}})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("prediction")


def test_a_prediction_for_generate(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="'prediction' must be a string"):
        llm.generate({"prompt": "One, two,", "prediction": 3}, use_tqdm=False)
    monkeypatch.setattr(llm.engine, "_speculator", speculator(llm, [PredictionDrafter()]))
    (output,) = llm.generate({"prompt": "One, two,", "prediction": " three, four, five, six, seven"}, use_tqdm=False)
    assert output.metrics.drafts["prediction"].drafted > 0
