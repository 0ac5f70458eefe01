"""What the site checks beyond MkDocs: every public name has a docstring and stands in the reference."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import griffe
from mkdocs.config.defaults import MkDocsConfig

# Each of these packages says in ``__all__`` what is public, and has a page in the reference.
PUBLIC_MODULES = {
    "radixkv": "reference/radixkv.md",
    "radixkv.errors": "reference/errors.md",
    "radixkv.cache": "reference/cache.md",
    "radixkv.testing": "reference/testing.md",
    "radixkv_kernels": "reference/kernels.md",
}

_log = logging.getLogger("mkdocs.hooks.public_names")


def on_pre_build(config: MkDocsConfig) -> None:
    """Warn of each public name without a docstring, which fails a strict build."""
    for name in undocumented_names():
        _log.warning("%s is public and has no docstring", name)


def on_page_content(html: str, **_: object) -> str:
    """A colon before an indented block, as docstrings write it, is one colon."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")


def undocumented_names() -> Iterator[str]:
    """Public names, and public methods and properties of public classes, without a docstring.

    A method that overrides a documented one, or implements one of a public protocol, needs none of its own.
    """
    loader = griffe.GriffeLoader(search_paths=[".", "kernels"])
    for package in {module.partition(".")[0] for module in PUBLIC_MODULES}:
        loader.load(package)
    loader.resolve_aliases(implicit=False)
    for name in PUBLIC_MODULES:
        module = loader.modules_collection[name]
        public = {export: _target(module[export]) for export in sorted(map(str, module.exports or ()))}
        protocols = [found for found in public.values() if isinstance(found, griffe.Class) and _is_protocol(found)]
        for export, found in public.items():
            if not found.has_docstring:
                yield f"{name}.{export}"
            if isinstance(found, griffe.Class):
                yield from (f"{name}.{export}.{member}" for member in _undocumented_members(found, protocols))


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
