"""What the site checks beyond MkDocs: every public name has a docstring and stands in the reference."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig

# Each says in ``__all__`` what is public, or else its page does.
PUBLIC_MODULES = {
    "radixkv": "reference/radixkv.md",
    "radixkv.config": "reference/config.md",
    "radixkv.errors": "reference/errors.md",
    "radixkv.cache": "reference/cache.md",
    "radixkv.cluster": "reference/cluster.md",
    "radixkv.ray": "reference/ray.md",
    "radixkv.routing": "reference/routing.md",
    "radixkv.testing": "reference/testing.md",
    "radixkv_cpu": "reference/cpu.md",
    "radixkv_kernels": "reference/kernels.md",
}

_log = logging.getLogger("mkdocs.hooks.public_names")


def on_pre_build(config: MkDocsConfig) -> None:
    """Warn of each public name that has no docstring or is not in the reference, which fails a strict build."""
    for problem in undocumented_names(Path(config.docs_dir)):
        _log.warning(problem)


def on_page_content(html: str, **_: object) -> str:
    """A colon before an indented block, as docstrings write it, is one colon."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")


def undocumented_names(docs: Path) -> Iterator[str]:
    """What is wrong with the reference: public names that are not in it, or have no docstring.

    A method that overrides a documented one, or implements one of a public protocol, needs none of its own.
    """
    loader = griffe.GriffeLoader(search_paths=[".", "kernels"])
    for package in {module.partition(".")[0] for module in PUBLIC_MODULES}:
        loader.load(package)
    loader.resolve_aliases(implicit=False)
    for name, page in PUBLIC_MODULES.items():
        module = loader.modules_collection[name]
        listed = set(re.findall(r"^::: (\S+)$", (docs / page).read_text(), re.MULTILINE))
        exported = [str(export) for export in module.exports or ()]
        if name not in listed:
            yield from (f"{name}.{e} is public and not in {page}" for e in exported if f"{name}.{e}" not in listed)
        public = {export: _target(module[export]) for export in exported or _names_of(name, listed)}
        protocols = [found for found in public.values() if isinstance(found, griffe.Class) and _is_protocol(found)]
        for export, found in public.items():
            if not found.has_docstring:
                yield f"{name}.{export} is public and has no docstring"
            if isinstance(found, griffe.Class):
                members = _undocumented_members(found, protocols)
                yield from (f"{name}.{export}.{member} is public and has no docstring" for member in members)


def _names_of(module: str, listed: set[str]) -> list[str]:
    """The names of a module among those that a page lists."""
    return sorted(entry.removeprefix(f"{module}.") for entry in listed if entry.startswith(f"{module}."))


def _target(found: griffe.Object | griffe.Alias) -> griffe.Object:
    return found.final_target if isinstance(found, griffe.Alias) else found


def _is_protocol(found: griffe.Class) -> bool:
    return any(str(base).startswith("Protocol") for base in found.bases)


def _undocumented_members(found: griffe.Class, protocols: list[griffe.Class]) -> Iterator[str]:
    documented = {
        name for base in (*found.mro(), *protocols) for name, member in base.members.items() if member.has_docstring
    }
    for name, member in found.members.items():
        is_property = member.is_attribute and "property" in member.labels
        callable_or_property = not member.is_alias and (member.is_function or is_property)
        if callable_or_property and not name.startswith("_") and not member.has_docstring and name not in documented:
            yield name
