"""A tenant's namespaces are recognised by their names."""

from __future__ import annotations

from radixkv.namespaces import is_derived, namespace_group, salt_of, salted


def test_namespaces_with_salts_are_derived_from_the_tenants_own_and_of_its_group() -> None:
    assert is_derived(salted("ann", "s"), "ann")
    assert [namespace_group(name) for name in ("ann", salted("ann", "s"), salted("annie", "s"))] == [
        "ann",
        "ann",
        "annie",
    ]
    assert [salt_of(name) for name in ("ann", salted("ann", "s"))] == ["", "s"]


def test_a_namespace_is_derived_neither_from_itself_nor_from_one_that_its_name_only_begins_with() -> None:
    assert not is_derived("ann", "ann")
    assert not is_derived(salted("annie", "s"), "ann")
