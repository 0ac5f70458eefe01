"""The entry of the command line: `radixkv`, or `python -m radixkv`."""

from __future__ import annotations


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also while its modules are imported."""
    try:
        from radixkv.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
