"""How models are probed while their modules are compared with what could stand in for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from support.model_zoo import build, logits

from radixkv.model.replacement.probe import probe_attention


def test_models_that_are_probed_at_a_time_in_two_threads_are_told_apart() -> None:
    """Each got the options of whichever was probed last: an attention scale that is not its own."""
    both_are_probed = Barrier(2, timeout=600)

    def scales(head_dim: int) -> set[float]:
        model = build("llama", {"head_dim": head_dim})
        with probe_attention(model) as probe:
            both_are_probed.wait()
            logits(model)
            both_are_probed.wait()
        assert {part.shape[-1] for part in probe.attended} == {head_dim}
        return {given["scaling"] for given in probe.options.values()}

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(scales, [4, 16])] == [{0.5}, {0.25}]
