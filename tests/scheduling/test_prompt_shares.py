"""A tenant that wants more than its share does not fill the steps in which others wait for a first token."""

from __future__ import annotations

from collections import Counter

from support.scheduler_driver import SchedulerDriver, prompt

from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.fair_shares import FairShares
from radixkv.scheduling.prompt_shares import bound_prompts
from radixkv.scheduling.tenant_share import TenantShare


def prompt_tokens(chunks: list[ScheduledChunk]) -> Counter[str]:
    """Tokens computed for prompts in a finished step, by tenant."""
    counts: Counter[str] = Counter()
    for chunk in chunks:
        if len(chunk.sequence.output_token_ids) == chunk.completes:
            counts[chunk.group.request.tenant] += chunk.num_tokens
    return counts


def test_who_wants_more_than_its_part_hardly_lengthens_the_steps_of_others() -> None:
    """A first token used to take as long as a step that the greedy tenant's prompts fill to the budget."""
    shares = {"heavy": TenantShare(weight=3.0)}
    driver = SchedulerDriver(max_num_seqs=8, budget=128, shares=shares)
    for tenant in ("greedy", "heavy"):
        for _ in range(12):
            driver.add(prompt(20), tenant=tenant, max_new=2)
    modest = [driver.add(prompt(16), tenant=f"modest {number}", max_new=1) for number in range(2)]
    # The others compute 32 tokens. Of as many, heavy may have half; greedy's sixth is raised to a sixteenth of the budget.
    assert prompt_tokens(driver.step()) == {"modest 0": 16, "modest 1": 16, "greedy": 8, "heavy": 16}
    assert all(request.sequences[0].output_token_ids for request in modest)
    later = driver.add([1], tenant="modest 0", max_new=1)
    counts = prompt_tokens(driver.step())
    assert later.sequences[0].output_token_ids
    assert counts["greedy"] <= 8
    assert counts["heavy"] <= 8
    assert prompt_tokens(driver.step()).total() > 30  # the whole budget, where nobody waits for it
    driver.run()


def test_single_tokens_are_not_left_to_later_steps() -> None:
    """Each sample of a group computes the last token of its prompt in the same step, or none does."""
    driver = SchedulerDriver(max_num_seqs=8, budget=32)
    chunks = []
    for tenant, num_tokens in (("greedy", 6), ("greedy", 1), ("greedy", 1), ("modest", 4)):
        request = driver.add(range(num_tokens), tenant=tenant)
        (group,) = driver.scheduler.groups_of(request)
        chunks.append(ScheduledChunk(group, group.sequences[0], num_tokens, completes=True))
    bounded = bound_prompts(chunks, ["greedy"], FairShares(), min_tokens=1)
    assert [chunk.num_tokens for chunk in bounded] == [2, 1, 1, 4]


def test_what_is_left_to_a_later_step_was_not_overtaken_in_this_one() -> None:
    """The second prompt was admitted before the third, though only the third gets its single token in this step."""
    driver = SchedulerDriver(max_num_seqs=4, budget=16, max_overtaken=0)
    greedy = [driver.add(prompt(length), tenant="greedy", max_new=2) for length in (4, 4, 1)]
    modest = driver.add(prompt(2), tenant="modest", max_new=2)
    assert prompt_tokens(driver.step()) == {"modest": 2, "greedy": 2}
    assert driver.admitted == [modest, *greedy]
    driver.run()
