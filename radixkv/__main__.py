"""`python -m radixkv`: the command line."""

from radixkv.cli import main

main()
