"""Which waiting groups' blocks are left to them by loads that begin."""

from __future__ import annotations

from radixkv.scheduling.load_claims import Claim, LoadClaims


def claimed(claims: LoadClaims) -> int:
    """Blocks that all groups together claim."""
    return claims.of_others(Claim())


def test_what_is_loaded_is_claimed_in_the_step_in_which_its_group_could_be_admitted_and_in_the_next() -> None:
    claims, loaded, loading = LoadClaims(), Claim(), Claim()
    claims.begin_step()
    claims.set(loading, 2, loading=True)
    claims.renew(loaded)
    claims.set(loaded, 5, loading=False)
    assert claimed(claims) == 7
    assert claims.of_others(loaded) == 2
    claims.begin_step()
    assert claimed(claims) == 7
    claims.begin_step()
    assert claimed(claims) == 2
    claims.renew(loaded)
    assert claimed(claims) == 7
    for claim in (loaded, loading):
        claims.end(claim)
    assert claimed(claims) == 0


def test_one_that_yields_claims_nothing_until_it_is_looked_at_again() -> None:
    claims, yielding = LoadClaims(), Claim()
    claims.renew(yielding)
    claims.set(yielding, 5, loading=False)
    claims.leave_to_others(yielding)
    assert claimed(claims) == 0
    claims.renew(yielding)
    assert claimed(claims) == 5
    claims.end(yielding)
    claims.end(yielding)  # as one whose group was gone before it claimed anything
    assert claimed(claims) == 0
