"""`radixkv keys`: keys for the server."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="API keys of the server.")


@app.command()
def new(name: Annotated[str, typer.Argument(help="name of the key's tenant: letters, digits, - and _")]) -> None:
    """Make a key and print it, with its entry for the file of `serve --keys-file`. The key is stored nowhere."""
    from radixkv.server.access.keys import hash_of, new_key

    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii() or len(name) > 64:
        raise ValueError(f"name: expected up to 64 letters, digits, - and _, got {name!r}")
    key = new_key()
    print(f"# The key, which is stored nowhere: {key}")
    print(f'[keys.{name}]\nsha256 = "{hash_of(key)}"')
