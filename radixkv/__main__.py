"""`python -m radixkv`: the command line."""

from radixkv.cli.main import main

main()
